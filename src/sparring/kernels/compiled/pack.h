// Layouts of the weights of matrix products.
#pragma once

#include "memory.h"
#include "parallel.h"
#include "tiles.h"

namespace sparring {

// rows [M][K] -> [ceil(M / 64)][64 / width][padded][width]: groups of rows become columns next to each other, zeros
// past M and K.
template <class P>
static void pack_columns(const P *rows, P *out, int64_t M, int64_t K, int64_t padded, int64_t width, int threads) {
    parallel_for(blocks_of(M, PANEL), threads, [=](int64_t panel) {
        for (int64_t m = panel * PANEL; m < (panel + 1) * PANEL; m += LANES)
            for (int64_t k = 0; k < padded; k += LANES) {
                v16 turned[LANES];
                for (int64_t i = 0; i < LANES; i++)
                    turned[i] = m + i < M && k < K ? load_tail(rows + (m + i) * K + k, K - k) : splat(0.0f);
                transpose(turned);
                P *columns = out + (m / width * padded + k) * width + m % width;
                for (int64_t i = 0; i < smaller(LANES, padded - k); i++) store(columns + i * width, turned[i]);
            }
    });
}

// Rows [M][K] of an even length: where K is odd, a copy in this thread's scratch with a zero behind each.
static inline const bf16 *even_rows(const bf16 *rows, int64_t M, int64_t K) {
    static thread_local Buffer<bf16> even;
    if (K % 2 == 0) return rows;
    bf16 *copy = even.room(M * (K + 1));
    for (int64_t m = 0; m < M; m++) {
        memcpy(copy + m * (K + 1), rows + m * K, K * sizeof(bf16));
        copy[m * (K + 1) + K] = {};
    }
    return copy;
}

// The same of pairs of neighbours in k, which stay together: [ceil(M / 64)][64 / width][padded pairs][width][2].
static inline void pack_pairs(const bf16 *rows, bf16 *out, int64_t M, int64_t K, int64_t padded, int64_t width,
                              int threads) {
    // vectors of floats that are moved and nothing else
    pack_columns((const float *)even_rows(rows, M, K), (float *)out, M, blocks_of(K, 2), padded, width, threads);
}

}  // namespace sparring
