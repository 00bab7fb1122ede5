/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Claim: what a part throws, on whichever thread, leaves the call on the caller's thread, the
 * object itself and once, when every part has ended; nothing of it is left behind. The end of a
 * thread passes too: the caller's own, once nobody works on its stack any more.
 */
#include "parts_client.h"

#include <chrono>
#include <mutex>
#include <new>
#include <pthread.h>
#include <stdexcept>
#include <thread>

/* An exception that counts those that are alive. */
struct Counted {
    static std::atomic<int> alive, made;
    size_t first;
    explicit Counted(size_t part) : first(part) {
        alive++, made++;
    }
    Counted(const Counted &other) : first(other.first) {
        alive++;
    }
    ~Counted() {
        alive--;
    }
};
std::atomic<int> Counted::alive{0}, Counted::made{0};

static std::thread::id caller;
static std::atomic<int> running, parts_ended;
enum Where { HERE, ELSEWHERE, EVERYWHERE };

/* Throw `what` on that side, and let both sides have parts. */
template <class Throw> static void throw_in(Where where, Throw what) {
    static std::atomic<bool> here_seen, elsewhere_seen;
    here_seen = elsewhere_seen = false;
    caller = std::this_thread::get_id();
    parts_ended = 0;
    original = [=](const Run &run) {
        struct Leave {
            ~Leave() {
                running--, parts_ended++;
            }
        } leave;
        running++;
        bool here = std::this_thread::get_id() == caller;
        (here ? here_seen : elsewhere_seen) = true;
        for (int i = 0; i < 2000 && !(here ? elsewhere_seen : here_seen); i++)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        REQUIRE(std::uncaught_exceptions() == 0);
        if (where == EVERYWHERE || here == (where == HERE))
            what(run);
    };
}

template <class Exception, class Throw> static void leaves_as(Throw what) {
    for (Where where : {HERE, ELSEWHERE, EVERYWHERE}) {
        Call call(256, MIB);
        for (int kind : {0, 1, 2, 3}) {
            throw_in(where, what);
            unsigned long before = double_divided();
            bool caught = false;
            try {
                call.run(kind);
            } catch (const Exception &) {
                REQUIRE(running == 0 && parts_ended > 1);
                REQUIRE(std::uncaught_exceptions() == 0);
                caught = true;
            }
            REQUIRE(caught && double_divided() == before + 1);
            original = [](const Run &) { REQUIRE(std::uncaught_exceptions() == 0); };
            call.check(call.run(kind));
        }
    }
}

/* Of several, that of the first keys; the others end. */
static void the_first_one() {
    throw_in(EVERYWHERE, [](const Run &run) { throw Counted(run.first); });
    int made = Counted::made;
    try {
        Call(256, MIB).run(2);
        REQUIRE(false);
    } catch (Counted &exception) {
        REQUIRE(exception.first == 0 && Counted::alive == 1);
    }
    REQUIRE(Counted::alive == 0 && Counted::made > made + 1);
}

/* It can be caught and thrown on as any other, from a frame below and with its cleanups. */
static void thrown_on() {
    throw_in(ELSEWHERE, [](const Run &run) { throw Counted(run.first); });
    std::exception_ptr kept;
    try {
        std::string cleanup(100, 'x');
        try {
            Call(256, MIB).run(0);
        } catch (...) {
            kept = std::current_exception();
            throw;
        }
    } catch (const Counted &) {
        REQUIRE(Counted::alive == 1);
    }
    kept = nullptr;
    REQUIRE(Counted::alive == 0);
}

/* A thread of its own makes a call in which `act` runs once on the thread or beside it. */
template <class Act> static bool came_back_after(Where where, Act act) {
    std::atomic<bool> came_back{false}, acted{false};
    std::thread thread([&] {
        Call call(256, MIB);
        throw_in(where, [&](const Run &) {
            if (!acted.exchange(true))
                act();
        });
        struct Leave {
            ~Leave() {
                REQUIRE(running == 0);
            }
        } leave;
        call.check(call.run(0));
        came_back = true;
    });
    thread.join();
    REQUIRE(acted);
    original = [](const Run &) {};
    return came_back;
}

static void ends_of_threads() {
    unsigned long before = double_divided();
    unsigned started = double_threads_started;
    REQUIRE(!came_back_after(HERE, [] { pthread_exit(nullptr); }));
    REQUIRE(!came_back_after(HERE, [] {
        pthread_cancel(pthread_self());
        pthread_testcancel();
    }));
    REQUIRE(double_threads_started == started);
    /* One of the library's own: its part is done again, and another thread takes its place. */
    REQUIRE(came_back_after(ELSEWHERE, [] { pthread_exit(nullptr); }));
    REQUIRE(came_back_after(ELSEWHERE, [] {}));
    REQUIRE(double_threads_started == started + 1 && double_divided() == before + 4);
}

/* Cancelled while it waits for the others: only after they have left. */
static void cancelled_while_waiting() {
    std::atomic<bool> waiting{false}, cancelled{false};
    std::thread thread([&] {
        throw_in(ELSEWHERE, [&](const Run &) {
            waiting = true;
            while (!cancelled)
                std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
        });
        struct Leave {
            ~Leave() {
                REQUIRE(running == 0);
            }
        } leave;
        Call call(256, MIB);
        call.check(call.run(0));
        pthread_testcancel();
        REQUIRE(false);
    });
    pthread_t handle = thread.native_handle();
    while (!waiting)
        std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50)); /* likely in its wait */
    pthread_cancel(handle);
    cancelled = true;
    thread.join();
}

static void many_callers() {
    std::vector<std::thread> callers;
    std::atomic<int> caught{0};
    original = [](const Run &run) {
        if (run.first % 3 == 0 && run.count > 1)
            throw Counted(run.first);
    };
    for (int i = 0; i < 4; i++) {
        callers.emplace_back([&] {
            Call call(256, MIB);
            for (int n = 0; n < 300; n++) {
                try {
                    call.run(n % 4);
                } catch (const Counted &) {
                    caught++;
                }
            }
        });
    }
    for (std::thread &thread : callers)
        thread.join();
    REQUIRE(caught == 4 * 300 && Counted::alive == 0);
}

int main() {
    double_element_bytes = 72;
    double_threads_left = 1000;
    set_calls(true, true, 3);
    leaves_as<std::runtime_error>(
        [](const Run &) { throw std::runtime_error("as Mooncake might"); });
    leaves_as<int>([](const Run &) { throw 5; });
    leaves_as<std::bad_alloc>([](const Run &) { throw std::bad_alloc(); });
    leaves_as<Counted>([](const Run &run) { throw Counted(run.first); });
    REQUIRE(Counted::alive == 0);
    the_first_one();
    thrown_on();
    ends_of_threads();
    cancelled_while_waiting();
    many_callers();
    return 0;
}
