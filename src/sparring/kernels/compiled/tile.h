// The register tile that every matrix product here is made of.
#pragma once

#include "simd.h"

namespace sparring {

constexpr int TILE_ROWS = 6;

// acc[r][c] += sum over k of a(r, k) * b(k, c), one fused multiply-add after the other in ascending k; where a and b
// give pairs, of pairs. Each element's chain is the same whatever R and C are, which is why a row alone and a row among
// others agree to the bit.
template <int R, int C, class A, class B>
static inline __attribute__((always_inline)) void accumulate(v16 (&acc)[R][C], int64_t begin, int64_t end, A a, B b) {
    for (int64_t k = begin; k < end; k++) {
        decltype(b(k, 0)) column[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) column[c] = b(k, c);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            auto value = splat(a(r, k));
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = fma(value, column[c], acc[r][c]);
        }
    }
}

template <int R, int C> static inline __attribute__((always_inline)) void clear(v16 (&acc)[R][C]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = splat(0.0f);
}

// Calls body<R>() with the compile-time row count that equals `rows` (1 to TILE_ROWS).
template <class Body> static inline void with_rows(int64_t rows, Body body) {
    switch (rows) {
        case 1: return body.template operator()<1>();
        case 2: return body.template operator()<2>();
        case 3: return body.template operator()<3>();
        case 4: return body.template operator()<4>();
        case 5: return body.template operator()<5>();
        default: return body.template operator()<6>();
    }
}

// body<C>(first) for all of `count` column vectors, as many at a time as a register tile takes.
template <class Body> static inline void with_columns(int64_t count, Body body) {
    int64_t first = 0;
    for (; first + WIDE <= count; first += WIDE) body.template operator()<WIDE>(first);
    if constexpr (WIDE > 2)
        for (; first + 2 <= count; first += 2) body.template operator()<2>(first);
    for (; first < count; first++) body.template operator()<1>(first);
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

}  // namespace sparring
