// y = x W^T + bias for a few rows on the calling thread: what the products over many rows and the decoder's step share.
#pragma once

#include "tiles.h"

namespace sparring {

constexpr int64_t K_BLOCK = 128;  // 128 x 64 floats of a panel are 32 KiB: they stay in the first-level cache
constexpr int64_t PREFETCH = 32;  // k steps ahead, when few rows make the panels the bottleneck

template <class Y> struct PanelProduct {
    const float *x, *panels, *bias;
    Y *y;
    int64_t M, K, y_stride;
};

// One tile over one block of k: total [R][PANEL] becomes, or grows by, the block's sums. Kept free of anything else: with
// a tail or a branch in it the compiler spills accumulators and a third of the speed is gone.
template <int R, int C, bool AHEAD>
static inline void tile_product(const float *x, int64_t stride, const float *b, float *total,
                                int64_t depth, bool first) {
    v16 acc[R][C];
    clear(acc);
    accumulate(acc, 0, depth, [=](int r, int64_t k) { return x[r * stride + k]; },
               [=](int64_t k, int c) {
                   if (AHEAD) __builtin_prefetch(b + (k + PREFETCH) * PANEL + c * LANES);
                   return load(b + k * PANEL + c * LANES);
               });
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *sum = total + r * PANEL + c * LANES;
            store(sum, first ? acc[r][c] : load(sum) + acc[r][c]);
        }
}

// y <- total + bias for the rows of a task and one panel.
template <class Y>
static void finish(const PanelProduct<Y> &w, const float *total, int64_t first_row, int64_t rows, int64_t panel) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = panel * PANEL, i = 0; i < PANEL && column < w.M; i += LANES, column += LANES) {
            v16 sum = load(total + row * PANEL + i);
            if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
            store_tail(w.y + (first_row + row) * w.y_stride + column, w.M - column, sum);
        }
}

template <class Y> static void run_panel(const PanelProduct<Y> &w, int64_t first_row, int64_t rows, int64_t panel) {
    alignas(64) static thread_local float total[ROWS_PER_TASK * PANEL];
    int64_t vectors = smaller(blocks_of(w.M - panel * PANEL, LANES), PANEL / LANES);
    for (int64_t begin = 0; begin < w.K; begin += K_BLOCK) {
        const float *b = w.panels + (panel * w.K + begin) * PANEL, *x = w.x + first_row * w.K + begin;
        int64_t depth = smaller(K_BLOCK, w.K - begin);
        for (int64_t row = 0; row < rows; row += TILE_ROWS)
            with_rows(smaller(rows - row, TILE_ROWS), [&]<int R>() {
                const float *in = x + row * w.K;
                float *sums = total + row * PANEL;
                int64_t v = 0;
                for (; v + WIDE <= vectors; v += WIDE) {
                    auto product = rows <= TILE_ROWS ? tile_product<R, WIDE, true> : tile_product<R, WIDE, false>;
                    product(in, w.K, b + v * LANES, sums + v * LANES, depth, begin == 0);
                }
                for (; v < vectors; v++) tile_product<R, 1, false>(in, w.K, b + v * LANES, sums + v * LANES, depth, begin == 0);
            });
    }
    finish(w, total, first_row, rows, panel);
}

struct Weight {
    const void *panels;
    int64_t layout, M, K;
    const float *bias;  // or null
};

enum { PANELS_F32 = 0, TILES_BF16 = 1, TILES_F32 = 2 };

static inline int64_t panel_bytes(const Weight &w) {
    if (w.layout == PANELS_F32) return w.K * PANEL * 4;
    return padded(w.K) * PANEL * 2 * (w.layout == TILES_F32 ? PLANES : 1);
}

// The columns of panels [begin, end) as a weight of their own.
static inline Weight columns_of(const Weight &w, int64_t begin, int64_t end) {
    return {(const char *)w.panels + begin * panel_bytes(w), w.layout, smaller(w.M, end * PANEL) - begin * PANEL, w.K,
            w.bias ? w.bias + begin * PANEL : nullptr};
}

// y [rows][M], rows y_stride apart <- x [rows][K] W^T + bias. The same bits as the functions over many rows.
template <class X, class Y> static void linear_rows(const Weight &w, const X *x, Y *y, int64_t y_stride, int64_t rows) {
    if (w.layout != PANELS_F32)
        return tile_rows(TileWeight{(const bf16 *)w.panels, w.bias, w.M, blocks_of(w.K, DEPTH)}, x, y, w.K, y_stride, rows);
    static thread_local Buffer<float> wide;
    const float *in;
    if constexpr (sizeof(X) == sizeof(float)) in = x;
    else {
        float *out = wide.room(rows * w.K);
        for (int64_t i = 0; i < rows * w.K; i += LANES) store_tail(out + i, rows * w.K - i, load_tail(x + i, rows * w.K - i));
        in = out;
    }
    PanelProduct<Y> product{in, (const float *)w.panels, w.bias, y, w.M, w.K, y_stride};
    for (int64_t row = 0; row < rows; row += ROWS_PER_TASK)
        for (int64_t panel = 0; panel < blocks_of(w.M, PANEL); panel++)
            run_panel(product, row, smaller(rows - row, ROWS_PER_TASK), panel);
}

}  // namespace sparring
