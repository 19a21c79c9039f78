// The one place that starts threads.
#pragma once

#include <cstdint>

namespace sparring {

// body(0) ... body(count - 1), in any order on up to `threads` threads. Bodies must not depend on each other.
template <class Body> static inline void parallel_for(int64_t count, int threads, Body body) {
    if (threads > count) threads = (int)count;
    if (threads <= 1) {
        for (int64_t i = 0; i < count; i++) body(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t i = 0; i < count; i++) body(i);
}

// The same over ranges of at least `grain` consecutive indices: body(begin, end).
template <class Body> static inline void parallel_ranges(int64_t count, int64_t grain, int threads, Body body) {
    int64_t size = (count + 4 * threads - 1) / (4 * threads);
    if (size < grain) size = grain;
    parallel_for((count + size - 1) / size, threads, [=](int64_t i) {
        body(i * size, (i + 1) * size < count ? (i + 1) * size : count);
    });
}

}  // namespace sparring
