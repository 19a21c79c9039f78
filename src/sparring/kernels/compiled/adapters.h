// Term of a low-rank adapter in a product: scale * B (A x).
#pragma once

#include "linear.h"
#include "rows.h"

namespace sparring {

extern "C" {
// Absent if b has no outputs. For experts, a and b are those of the first.
struct DeltaPlan {
    Weight a, b;
    float scale;
};
}

// Calls body(number, first, count) for each run of consecutive rows with the same adapter; negative: no adapter.
template <class Number, class Body>
static inline void adapt_rows(int64_t count, const Number &number_of, const Body &body) {
    for (int64_t i = 0, end; i < count; i = end) {
        int32_t number = number_of(i);
        for (end = i + 1; end < count && number_of(end) == number;) end++;
        if (number >= 0) body(number, i, end - i);
    }
}

// y [rows][M] <- y + B (scale * A x), x [rows][K]; the columns of both products divided among threads.
template <class T>
static void add_delta(const DeltaPlan &delta, const Weight &a, const Weight &b, const T *x, T *y, int64_t rows,
                      int threads) {
    static thread_local Buffer<float> of_a;
    static thread_local Buffer<T> of_scale, of_b;
    if (!delta.b.M) return;
    float *wide = of_a.room(rows * a.M);
    T *scaled = of_scale.room(rows * a.M), *sums = of_b.room(rows * b.M);
    linear_columns(a, x, wide, rows, threads);
    for (int64_t i = 0, count = rows * a.M; i < count; i += LANES)
        store_tail(scaled + i, count - i, load_tail(wide + i, count - i) * splat(delta.scale));
    linear_columns(b, (const T *)scaled, sums, rows, threads);
    for (int64_t i = 0, count = rows * b.M; i < count; i += LANES)
        store_tail(y + i, count - i, load_tail(y + i, count - i) + load_tail(sums + i, count - i));
}

}  // namespace sparring
