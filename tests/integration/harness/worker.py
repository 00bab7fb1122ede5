"""The driven end: reads calls as JSON lines from standard input, runs them, writes results to the given fd."""

import importlib
import json
import os
import sys
import traceback


class Worker:
    """What calls share: the store client, the transfer engine, buffers."""

    def __init__(self):
        self.store = None
        self.engine = None
        self.kept = {}


def main():
    replies = os.fdopen(int(sys.argv[1]), "w")
    os.set_inheritable(replies.fileno(), False)
    worker = Worker()
    for line in sys.stdin:
        call = json.loads(line)
        answer = {"number": call["number"]}
        try:
            function = getattr(importlib.import_module(call["module"]), call["function"])
            answer["result"] = function(worker, **call["arguments"])
        except BaseException:
            answer["error"] = traceback.format_exc()
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
