"""What the end-to-end tests stand on: processes of a stock Mooncake wheel, driven and killed at will.

| module           | what it is for                                                           |
|------------------|--------------------------------------------------------------------------|
| wheels           | which stock wheel, its interpreter and its surroundings                  |
| cluster          | a master, stores and engines as processes; Tidepool's environment        |
| process          | one driven process: calls over pipes, signals, time limits               |
| program          | a program that is not driven: mooncake_client                            |
| real_client      | a C++ program with Mooncake's RealClient, driven                         |
| worker           | the other end of those pipes, run by the wheel's interpreter             |
| status           | the counters of the processes of a directory, read from outside          |
| ports            | which port the next one may listen on                                    |
| mounts           | tmpfs and hugetlbfs for one test                                         |
| memory           | buffers with guards around them, random contents                         |
| actions_store    | what a worker can be told to do with mooncake.store                      |
| actions_engine   | what a worker can be told to do with mooncake.engine                     |
| actions_double   | what a worker can be told to do with GPU memory, on the double           |
| actions_parts    | what a worker can be told to do with batched calls of many keys          |
| actions_process  | what a worker can be told about itself: fds, threads, mappings, forks    |
"""
