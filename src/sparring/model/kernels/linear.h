// y = x W^T + bias for a few rows on the calling thread: what the products over many rows and the decoder's step share.
#pragma once

#include <vector>

#include "tile.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define SPARRING_AMX 1
#endif

namespace sparring {

constexpr int PANEL = 64;
constexpr int64_t K_BLOCK = 128;  // 128 x 64 floats of a panel are 32 KiB: they stay in the first-level cache
constexpr int64_t ROWS_PER_TASK = 192;
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

constexpr int64_t DEPTH = 32, TILE = 16;  // k of one tile; its rows

static inline int64_t padded(int64_t K) { return blocks_of(K, DEPTH) * DEPTH; }

struct TileProduct {
    const bf16 *x;  // [N][depth]
    const bf16 *panels;
    const float *bias;
    int64_t M, depth, y_stride;
};

#ifdef SPARRING_AMX
constexpr int ASK_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

static inline bool permitted() {
    static const bool yes = syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
    return yes;
}

// Tiles 0-3: sums of 2 x 2; 4, 5: rows of x; 6, 7: columns of a panel. `above` and `below` are the rows of either half.
static inline void shape_tiles(int64_t above, int64_t below) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    const int64_t rows[8] = {above, above, below, below, above, below, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = (uint8_t)rows[i];
        shape.row_bytes[i] = rows[i] ? 64 : 0;
    }
    _tile_loadconfig(&shape);
}

// sums [32][PANEL] <- up to 32 rows of x times half a panel (32 columns from `column`).
static inline void amx_product(const bf16 *x, const bf16 *b, float *sums, int64_t depth, bool two) {
    const int64_t row_bytes = depth * 2, panel_bytes = PANEL * 4, sum_bytes = PANEL * 4;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += DEPTH) {
        _tile_loadd(4, x + k, row_bytes);
        _tile_loadd(6, b + k * PANEL, panel_bytes);
        _tile_loadd(7, b + k * PANEL + 2 * TILE, panel_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x + TILE * depth + k, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sum_bytes);
    _tile_stored(1, sums + TILE, sum_bytes);
    if (two) {
        _tile_stored(2, sums + TILE * PANEL, sum_bytes);
        _tile_stored(3, sums + TILE * PANEL + TILE, sum_bytes);
    }
}

template <class T>
static void run_tiles(const TileProduct &w, T *y, int64_t first, int64_t last, int64_t panel) {
    alignas(64) float sums[2 * TILE * PANEL];
    const bf16 *b = w.panels + panel * w.depth * PANEL;
    int64_t columns = smaller(PANEL, w.M - panel * PANEL), shaped = 0;
    for (int64_t row = first; row < last; row += 2 * TILE) {
        int64_t rows = smaller(last - row, 2 * TILE);
        if (rows != shaped) shape_tiles(smaller(rows, TILE), larger(rows - TILE, 0));
        shaped = rows;
        for (int64_t half = 0; half < columns; half += 2 * TILE)
            amx_product(w.x + row * w.depth, b + half * 2, sums + half, w.depth, rows > TILE);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < columns; i += LANES) {
                int64_t column = panel * PANEL + i;
                v16 sum = load(sums + r * PANEL + i);
                if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
                store_tail(y + (row + r) * w.y_stride + column, w.M - column, sum);
            }
    }
    _tile_release();
}

#else
static inline bool permitted() { return false; }
#endif

struct Weight {
    const void *panels;
    int64_t layout, M, K;
    const float *bias;  // or null
};

enum { PANELS_F32 = 0, TILES_BF16 = 1, TILES_F32 = 2 };

// The columns of panels [begin, end) as a weight of their own.
static inline Weight columns_of(const Weight &w, int64_t begin, int64_t end) {
    int64_t bytes = w.layout == PANELS_F32 ? w.K * PANEL * 4 : blocks_of(w.K, 32) * 32 * PANEL * 2;
    return {(const char *)w.panels + begin * bytes, w.layout, smaller(w.M, end * PANEL) - begin * PANEL, w.K,
            w.bias ? w.bias + begin * PANEL : nullptr};
}

// y [rows][M], rows y_stride apart <- x [rows][K] W^T + bias. The same bits as the functions over many rows.
template <class X, class Y> static void linear_rows(const Weight &w, const X *x, Y *y, int64_t y_stride, int64_t rows) {
    static thread_local std::vector<float> wide;
    static thread_local std::vector<bf16> deep;
    if (w.layout == PANELS_F32) {
        const float *in;
        if constexpr (sizeof(X) == sizeof(float)) in = x;
        else {
            if ((int64_t)wide.size() < rows * w.K + LANES) wide.resize(rows * w.K + LANES);
            for (int64_t i = 0; i < rows * w.K; i += LANES) store_tail(wide.data() + i, rows * w.K - i, load_tail(x + i, rows * w.K - i));
            in = wide.data();
        }
        PanelProduct<Y> product{in, (const float *)w.panels, w.bias, y, w.M, w.K, y_stride};
        for (int64_t row = 0; row < rows; row += ROWS_PER_TASK)
            for (int64_t panel = 0; panel < blocks_of(w.M, PANEL); panel++)
                run_panel(product, row, smaller(rows - row, ROWS_PER_TASK), panel);
    }
#ifdef SPARRING_AMX
    if constexpr (sizeof(X) == sizeof(bf16)) {
        if (w.layout != TILES_BF16) return;
        int64_t depth = blocks_of(w.K, DEPTH) * DEPTH;
        const bf16 *in = (const bf16 *)x;
        if (depth != w.K) {
            if ((int64_t)deep.size() < rows * depth) deep.resize(rows * depth);
            for (int64_t r = 0; r < rows; r++) {
                memcpy(deep.data() + r * depth, in + r * w.K, w.K * sizeof(bf16));
                memset(deep.data() + r * depth + w.K, 0, (depth - w.K) * sizeof(bf16));
            }
            in = deep.data();
        }
        TileProduct product{in, (const bf16 *)w.panels, w.bias, w.M, depth, y_stride};
        for (int64_t row = 0; row < rows; row += ROWS_PER_TASK)
            for (int64_t panel = 0; panel < blocks_of(w.M, PANEL); panel++)
                run_tiles(product, y, row, smaller(rows, row + ROWS_PER_TASK), panel);
    }
#endif
}

}  // namespace sparring
