// y = x W^T + bias for a few rows on the calling thread: common part of products over many rows and decoder steps.
#pragma once

#include "pack.h"

namespace sparring {

constexpr int64_t K_BLOCK = 128;  // 128 x 64 floats of a panel are 32 KiB: they stay in the first-level cache
constexpr int64_t PREFETCH = 32;  // k steps ahead
constexpr int64_t FEW_ROWS = 4 * TILE_ROWS;  // for which widening a block in memory first does not pay
constexpr int64_t AHEAD_OF_WIDENING = 4096;  // numbers
template <class P> constexpr int64_t PER_LINE = 64 / sizeof(P);
template <class P> constexpr int LINES_OF = PANEL / PER_LINE<P>;  // of one k of a panel

// P is the stored type of the weight, X the type of x. A bf16 is converted to float before it is used; pairs of bf16
// are multiplied directly, and then K counts pairs.
template <class Y, class P, class X> struct PanelProduct {
    const X *x;
    const P *panels;
    const float *bias;
    Y *y;
    int64_t M, K, y_stride;
};

// One tile over one block of k: total [R][PANEL] becomes, or grows by, the block's sums. At each k, the next LINES
// cache lines from `ahead` on are asked for. Kept free of anything else: with a tail or a branch in it the compiler
// spills accumulators and a third of the speed is gone.
template <int R, int C, int LINES, class X, class P>
static inline void tile_product(const X *x, int64_t stride, const P *b, float *total, int64_t depth, bool first,
                                const P *ahead) {
    v16 acc[R][C];
    clear(acc);
    accumulate(acc, 0, depth, [=](int r, int64_t k) { return x[r * stride + k]; },
               [=](int64_t k, int c) {
                   if (c < LINES) __builtin_prefetch(ahead + (k * LINES + c) * PER_LINE<P>);
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
template <class Y, class P, class X>
static void finish(const PanelProduct<Y, P, X> &w, const float *total, int64_t first_row, int64_t rows, int64_t panel) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = panel * PANEL, i = 0; i < PANEL && column < w.M; i += LANES, column += LANES) {
            v16 sum = load(total + row * PANEL + i);
            if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
            store_tail(w.y + (first_row + row) * w.y_stride + column, w.M - column, sum);
        }
}

// One block of k of a panel for all rows of a task; where `far`, what comes next in the panel is not in the cache yet.
// A single tile asks for it a little ahead; of several, each asks for a stretch of the next block while it computes
// with this one (two for half of it each, so they are of one height). Into the first-level cache: asked for into the
// second one, 32 rows took 1.15 times as long.
template <class X, class P>
static void run_block(const X *x, int64_t stride, const P *b, float *total, int64_t rows, int64_t vectors,
                      int64_t depth, bool first, bool far) {
    int64_t tiles = blocks_of(rows, TILE_ROWS), height = tiles == 2 ? blocks_of(rows, 2) : TILE_ROWS;
    for (int64_t tile = 0; tile < tiles; tile++)
        with_rows(smaller(rows - tile * height, height), [&]<int R>() {
            const X *in = x + tile * height * stride;
            float *sums = total + tile * height * PANEL;
            auto product = [&]<int LINES>(const P *ahead) {
                int64_t v = 0;
                for (; v + WIDE <= vectors; v += WIDE)
                    tile_product<R, WIDE, LINES>(in, stride, b + v * LANES, sums + v * LANES, depth, first,
                                                 ahead + v * LANES);
                for (; v < vectors; v++)
                    tile_product<R, 1, 0>(in, stride, b + v * LANES, sums + v * LANES, depth, first, b);
            };
            const P *next = b + depth * PANEL;
            if (far && tiles == 1) product.template operator()<LINES_OF<P>>(b + PREFETCH * PER_LINE<P> / LANES * PANEL);
            else if (far && tiles < LINES_OF<P> && 2 * tile < LINES_OF<P>)
                product.template operator()<2>(next + 2 * tile * depth * PER_LINE<P>);
            else if (far && tile < LINES_OF<P>) product.template operator()<1>(next + tile * depth * PER_LINE<P>);
            else product.template operator()<0>(b);
        });
}

// A block of a panel as floats, once for all tiles of a task.
static inline const float *widened(const bf16 *b, int64_t count) {
    alignas(64) static thread_local float wide[K_BLOCK * PANEL];
    for (int64_t i = 0; i < count; i += LANES) {
        __builtin_prefetch(b + i + AHEAD_OF_WIDENING);
        store(wide + i, load(b + i));
    }
    return wide;
}

template <class Y, class P, class X>
static void run_panel(const PanelProduct<Y, P, X> &w, int64_t first_row, int64_t rows, int64_t panel) {
    alignas(64) static thread_local float total[ROWS_PER_TASK * PANEL];
    int64_t vectors = smaller(blocks_of(w.M - panel * PANEL, LANES), PANEL / LANES);
    for (int64_t begin = 0; begin < w.K; begin += K_BLOCK) {
        const P *b = w.panels + (panel * w.K + begin) * PANEL;
        const X *x = w.x + first_row * w.K + begin;
        int64_t depth = smaller(K_BLOCK, w.K - begin);
        if constexpr (sizeof(P) < sizeof(X))
            if (rows > FEW_ROWS) {
                run_block(x, w.K, widened(b, depth * PANEL), total, rows, vectors, depth, begin == 0, false);
                continue;
            }
        run_block(x, w.K, b, total, rows, vectors, depth, begin == 0, true);
    }
    finish(w, total, first_row, rows, panel);
}

struct Weight {
    const void *panels;
    int64_t layout, M, K;
    const float *bias;  // or null
};

enum { PANELS_F32 = 0, TILES_BF16 = 1, TILES_F32 = 2, PANELS_BF16 = 3, PAIRS_BF16 = 4 };

static inline int64_t panel_bytes(const Weight &w) {
    if (w.layout == PANELS_F32 || w.layout == PANELS_BF16) return w.K * PANEL * (w.layout == PANELS_F32 ? 4 : 2);
    if (w.layout == PAIRS_BF16) return blocks_of(w.K, 2) * PANEL * 4;
    return padded(w.K) * PANEL * 2 * (w.layout == TILES_F32 ? PLANES : 1);
}

// The columns of panels [begin, end) as a weight of their own.
static inline Weight columns_of(const Weight &w, int64_t begin, int64_t end) {
    return {(const char *)w.panels + begin * panel_bytes(w), w.layout, smaller(w.M, end * PANEL) - begin * PANEL, w.K,
            w.bias ? w.bias + begin * PANEL : nullptr};
}

// The e-th of contiguously packed weights that begin at `w`; their biases are [E][M].
static inline Weight nth(const Weight &w, int64_t e) {
    return {(const char *)w.panels + e * blocks_of(w.M, PANEL) * panel_bytes(w), w.layout, w.M, w.K,
            w.bias ? w.bias + e * w.M : nullptr};
}

template <class P, class X, class Y>
static void panel_rows(const Weight &w, const X *x, int64_t K, Y *y, int64_t y_stride, int64_t rows) {
    PanelProduct<Y, P, X> product{x, (const P *)w.panels, w.bias, y, w.M, K, y_stride};
    for (int64_t row = 0; row < rows; row += ROWS_PER_TASK)
        for (int64_t panel = 0; panel < blocks_of(w.M, PANEL); panel++)
            run_panel(product, row, smaller(rows - row, ROWS_PER_TASK), panel);
}

// Rows of x [rows][K] as floats.
template <class X> static const float *floats_of(const X *x, int64_t rows, int64_t K) {
    static thread_local Buffer<float> wide;
    if constexpr (sizeof(X) == sizeof(float)) return x;
    else {
        float *out = wide.room(rows * K);
        for (int64_t i = 0; i < rows * K; i += LANES) store_tail(out + i, rows * K - i, load_tail(x + i, rows * K - i));
        return out;
    }
}

// y [rows][M], rows y_stride apart <- x [rows][K] W^T + bias. The same bits as the functions over many rows.
template <class X, class Y> static void linear_rows(const Weight &w, const X *x, Y *y, int64_t y_stride, int64_t rows) {
    if (w.layout == TILES_BF16 || w.layout == TILES_F32)
        return tile_rows(TileWeight{(const bf16 *)w.panels, w.bias, w.M, blocks_of(w.K, DEPTH)}, x, y, w.K, y_stride,
                         rows);
#ifdef SPARRING_PAIRS
    if constexpr (sizeof(X) == sizeof(bf16))
        if (w.layout == PAIRS_BF16)
            return panel_rows<pair>(w, (const pair *)even_rows(x, rows, w.K), blocks_of(w.K, 2), y, y_stride, rows);
#endif
    const float *in = floats_of(x, rows, w.K);
    if (w.layout == PANELS_F32) panel_rows<float>(w, in, w.K, y, y_stride, rows);
    else panel_rows<bf16>(w, in, w.K, y, y_stride, rows);
}

// The same into y [rows][M], each thread a share of the columns.
template <class X, class Y> static void linear_columns(const Weight &w, const X *x, Y *y, int64_t rows, int threads) {
    int64_t panels = blocks_of(w.M, PANEL), parts = smaller(threads, panels);
    parallel_for(parts, threads, [&](int64_t part) {
        int64_t begin = panels * part / parts, end = panels * (part + 1) / parts;
        linear_rows(columns_of(w, begin, end), x, y + begin * PANEL, w.M, rows);
    });
}

}  // namespace sparring
