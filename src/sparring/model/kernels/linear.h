// y = x W^T + bias for a few rows on the calling thread: what the products over many rows and the decoder's step share.
#pragma once

#include "tiles.h"

namespace sparring {

constexpr int64_t K_BLOCK = 128;  // 128 x 64 floats of a panel are 32 KiB: they stay in the first-level cache
constexpr int64_t PREFETCH = 32;  // k steps ahead
constexpr int64_t FEW_ROWS = 4 * TILE_ROWS;  // for which widening a block in memory first does not pay
constexpr int64_t AHEAD_OF_WIDENING = 4096;  // numbers

// P is what the weight is stored as, float or bf16: a bf16 becomes the float that it is before anything is computed with it.
template <class Y, class P> struct PanelProduct {
    const float *x;
    const P *panels;
    const float *bias;
    Y *y;
    int64_t M, K, y_stride;
};

// One tile over one block of k: total [R][PANEL] becomes, or grows by, the block's sums. Kept free of anything else: with
// a tail or a branch in it the compiler spills accumulators and a third of the speed is gone.
template <int R, int C, bool AHEAD, class P>
static inline void tile_product(const float *x, int64_t stride, const P *b, float *total, int64_t depth, bool first) {
    constexpr int64_t ahead = PREFETCH * sizeof(float) / sizeof(P);
    v16 acc[R][C];
    clear(acc);
    accumulate(acc, 0, depth, [=](int r, int64_t k) { return x[r * stride + k]; },
               [=](int64_t k, int c) {
                   if (AHEAD) __builtin_prefetch(b + (k + ahead) * PANEL + c * LANES);
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
template <class Y, class P>
static void finish(const PanelProduct<Y, P> &w, const float *total, int64_t first_row, int64_t rows, int64_t panel) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = panel * PANEL, i = 0; i < PANEL && column < w.M; i += LANES, column += LANES) {
            v16 sum = load(total + row * PANEL + i);
            if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
            store_tail(w.y + (first_row + row) * w.y_stride + column, w.M - column, sum);
        }
}

// One block of k of a panel for all rows of a task; `ahead`: what comes next in the panel is not in the cache yet.
template <class P>
static void run_block(const float *x, int64_t stride, const P *b, float *total, int64_t rows, int64_t vectors, int64_t depth,
                      bool first, bool ahead) {
    for (int64_t row = 0; row < rows; row += TILE_ROWS)
        with_rows(smaller(rows - row, TILE_ROWS), [&]<int R>() {
            const float *in = x + row * stride;
            float *sums = total + row * PANEL;
            int64_t v = 0;
            for (; v + WIDE <= vectors; v += WIDE) {
                auto product = ahead && row == 0 ? tile_product<R, WIDE, true, P> : tile_product<R, WIDE, false, P>;
                product(in, stride, b + v * LANES, sums + v * LANES, depth, first);
            }
            for (; v < vectors; v++) tile_product<R, 1, false, P>(in, stride, b + v * LANES, sums + v * LANES, depth, first);
        });
}

template <class Y, class P>
static void run_panel(const PanelProduct<Y, P> &w, int64_t first_row, int64_t rows, int64_t panel) {
    alignas(64) static thread_local float total[ROWS_PER_TASK * PANEL], wide[K_BLOCK * PANEL];
    int64_t vectors = smaller(blocks_of(w.M - panel * PANEL, LANES), PANEL / LANES);
    for (int64_t begin = 0; begin < w.K; begin += K_BLOCK) {
        const P *b = w.panels + (panel * w.K + begin) * PANEL;
        const float *x = w.x + first_row * w.K + begin;
        int64_t depth = smaller(K_BLOCK, w.K - begin);
        if (sizeof(P) == sizeof(float) || rows <= FEW_ROWS) {
            run_block(x, w.K, b, total, rows, vectors, depth, begin == 0, true);
            continue;
        }
        for (int64_t i = 0; i < depth * PANEL; i += LANES) {  // once for all tiles of the task
            __builtin_prefetch(b + i + AHEAD_OF_WIDENING);
            store(wide + i, load(b + i));
        }
        run_block<float>(x, w.K, wide, total, rows, vectors, depth, begin == 0, false);
    }
    finish(w, total, first_row, rows, panel);
}

struct Weight {
    const void *panels;
    int64_t layout, M, K;
    const float *bias;  // or null
};

enum { PANELS_F32 = 0, TILES_BF16 = 1, TILES_F32 = 2, PANELS_BF16 = 3 };

static inline int64_t panel_bytes(const Weight &w) {
    if (w.layout == PANELS_F32 || w.layout == PANELS_BF16) return w.K * PANEL * (w.layout == PANELS_F32 ? 4 : 2);
    return padded(w.K) * PANEL * 2 * (w.layout == TILES_F32 ? PLANES : 1);
}

// The columns of panels [begin, end) as a weight of their own.
static inline Weight columns_of(const Weight &w, int64_t begin, int64_t end) {
    return {(const char *)w.panels + begin * panel_bytes(w), w.layout, smaller(w.M, end * PANEL) - begin * PANEL, w.K,
            w.bias ? w.bias + begin * PANEL : nullptr};
}

template <class P, class Y> static void panel_rows(const Weight &w, const float *x, Y *y, int64_t y_stride, int64_t rows) {
    PanelProduct<Y, P> product{x, (const P *)w.panels, w.bias, y, w.M, w.K, y_stride};
    for (int64_t row = 0; row < rows; row += ROWS_PER_TASK)
        for (int64_t panel = 0; panel < blocks_of(w.M, PANEL); panel++)
            run_panel(product, row, smaller(rows - row, ROWS_PER_TASK), panel);
}

// y [rows][M], rows y_stride apart <- x [rows][K] W^T + bias. The same bits as the functions over many rows.
template <class X, class Y> static void linear_rows(const Weight &w, const X *x, Y *y, int64_t y_stride, int64_t rows) {
    if (w.layout == TILES_BF16 || w.layout == TILES_F32)
        return tile_rows(TileWeight{(const bf16 *)w.panels, w.bias, w.M, blocks_of(w.K, DEPTH)}, x, y, w.K, y_stride, rows);
    static thread_local Buffer<float> wide;
    const float *in;
    if constexpr (sizeof(X) == sizeof(float)) in = x;
    else {
        float *out = wide.room(rows * w.K);
        for (int64_t i = 0; i < rows * w.K; i += LANES) store_tail(out + i, rows * w.K - i, load_tail(x + i, rows * w.K - i));
        in = out;
    }
    if (w.layout == PANELS_F32) panel_rows<float>(w, in, y, y_stride, rows);
    else panel_rows<bf16>(w, in, y, y_stride, rows);
}

}  // namespace sparring
