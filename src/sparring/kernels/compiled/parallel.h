// The one place that starts threads.
//
// The caller does the work; helper threads take pieces of it if the system schedules them in time. A helper that is not
// scheduled costs its share of speed, but no wait: the caller waits only for pieces that a helper has begun.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sparring {

constexpr int SPINS =
    300;  // about 10 us: the next region often follows at once, and waking a sleeping thread takes five times as long

static inline void pause_briefly() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// body(0) ... body(count - 1), each piece once, on any thread.
struct Job {
    void (*call)(const void *body, int64_t piece);
    const void *body;
    int64_t count;
    int wanted;  // helpers that may still come; guarded by the pool's lock
    std::atomic<int64_t> next{0};
    std::atomic<int> inside{0};

    void work() {
        for (int64_t piece = next.fetch_add(1); piece < count; piece = next.fetch_add(1)) call(body, piece);
    }
};

// Helper threads of all callers. They sleep when idle and are never joined: they are detached and end with the process.
class Pool {
    std::mutex lock;
    std::condition_variable work_came, helper_left;
    std::vector<Job *> jobs;
    int helpers = 0;
    std::atomic<uint64_t> posted{0};

    Job *choose() {
        for (Job *job : jobs)
            if (job->wanted > 0 && job->next.load() < job->count) return job;
        return nullptr;
    }

    void help() {
        std::unique_lock<std::mutex> held(lock);
        for (;;) {
            Job *job = choose();
            if (!job) {
                uint64_t seen = posted.load();
                held.unlock();
                for (int i = 0; i < SPINS && posted.load() == seen; i++) pause_briefly();
                held.lock();
                work_came.wait(held, [&] { return posted.load() != seen; });
                continue;
            }
            job->wanted--;
            job->inside++;
            held.unlock();
            job->work();
            held.lock();
            if (--job->inside == 0) helper_left.notify_all();
        }
    }

   public:
    static Pool &shared() {
        static Pool *pool = new Pool;
        return *pool;
    }

    void run(Job &job) {
        int wanted = job.wanted;
        {
            std::lock_guard<std::mutex> held(lock);
            for (; helpers < wanted; helpers++) std::thread([this] { help(); }).detach();
            jobs.push_back(&job);
            posted++;
        }
        if (wanted == 1) work_came.notify_one();
        else work_came.notify_all();
        job.work();
        for (int i = 0; i < SPINS && job.inside.load() > 0; i++) pause_briefly();
        std::unique_lock<std::mutex> held(lock);
        for (size_t i = 0; i < jobs.size(); i++)
            if (jobs[i] == &job) jobs.erase(jobs.begin() + i);
        helper_left.wait(held, [&] { return job.inside.load() == 0; });
    }
};

// body(0) ... body(count - 1), in any order on up to `threads` threads. Bodies must not depend on each other.
template <class Body> static inline void parallel_for(int64_t count, int threads, const Body &body) {
    if (threads > count) threads = (int)count;
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
    Job job{[](const void *b, int64_t piece) { (*(const Body *)b)(piece); }, &body, count, threads - 1};
    Pool::shared().run(job);
}

// The same over ranges of at least `grain` consecutive indices: body(begin, end).
template <class Body> static inline void parallel_ranges(int64_t count, int64_t grain, int threads, const Body &body) {
    int64_t size = (count + 4 * threads - 1) / (4 * threads);
    if (size < grain) size = grain;
    parallel_for((count + size - 1) / size, threads, [&](int64_t i) {
        body(i * size, (i + 1) * size < count ? (i + 1) * size : count);
    });
}

}  // namespace sparring
