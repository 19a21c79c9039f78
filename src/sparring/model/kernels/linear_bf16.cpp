// y = x W^T + bias for bfloat16 on processors with AMX tiles; others widen the weight and use linear.cpp.
//
// A weight [M, K] is stored as panels [ceil(M / 64)][depth / 2][64][2], depth = K rounded up to 32 with zeros: pairs of k
// next to each other, as TDPBF16PS reads them. That instruction adds, for each element of a tile, 16 pairs of products in
// ascending order to a float32 sum; it never mixes rows. An element of y is one such chain over all of K, then the bias,
// then one rounding, whatever the rows around it.
#include "parallel.h"
#include "tile.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define SPARRING_AMX 1
#endif

namespace sparring {
namespace {

constexpr int64_t PANEL = 64, DEPTH = 32;  // columns of a panel; k of one tile
constexpr int64_t TILE = 16, ROWS_PER_TASK = 192;

static inline int64_t padded(int64_t K) { return blocks_of(K, DEPTH) * DEPTH; }

struct Product {
    const bf16 *x;  // [N][depth]
    const bf16 *panels;
    const float *bias;
    int64_t N, M, depth;
};

#ifdef SPARRING_AMX
constexpr int ASK_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

static bool permitted() {
    static const bool yes = syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
    return yes;
}

// Tiles 0-3: sums of 2 x 2; 4, 5: rows of x; 6, 7: columns of a panel. `above` and `below` are the rows of either half.
static void shape_tiles(int64_t above, int64_t below) {
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
static void tile_product(const bf16 *x, const bf16 *b, float *sums, int64_t depth, bool two) {
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
static void run(const Product &w, T *y, int64_t first, int64_t last, int64_t panel) {
    alignas(64) float sums[2 * TILE * PANEL];
    const bf16 *b = w.panels + panel * w.depth * PANEL;
    int64_t columns = smaller(PANEL, w.M - panel * PANEL), shaped = 0;
    for (int64_t row = first; row < last; row += 2 * TILE) {
        int64_t rows = smaller(last - row, 2 * TILE);
        if (rows != shaped) shape_tiles(smaller(rows, TILE), larger(rows - TILE, 0));
        shaped = rows;
        for (int64_t half = 0; half < columns; half += 2 * TILE)
            tile_product(w.x + row * w.depth, b + half * 2, sums + half, w.depth, rows > TILE);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < columns; i += LANES) {
                int64_t column = panel * PANEL + i;
                v16 sum = load(sums + r * PANEL + i);
                if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
                store_tail(y + (row + r) * w.M + column, w.M - column, sum);
            }
    }
    _tile_release();
}

template <class T> static void product(const Product &w, T *y, int threads) {
    int64_t num_panels = blocks_of(w.M, PANEL), rows = ROWS_PER_TASK;
    if (w.M * w.depth < 200000 && w.N * w.M * w.depth < 4000000) threads = 1;
    while (rows > 2 * TILE && num_panels * blocks_of(w.N, rows) < 4 * threads) rows = blocks_of(rows / 2, 2 * TILE) * 2 * TILE;
    parallel_for(num_panels * blocks_of(w.N, rows), threads, [=](int64_t t) {
        int64_t row = t / num_panels * rows;
        run(w, y, row, smaller(row + rows, w.N), t % num_panels);
    });
}
#else
static bool permitted() { return false; }
template <class T> static void product(const Product &, T *, int) {}
#endif

}  // namespace

extern "C" {

// 1 when this build and this process may use AMX tiles; the bf16 functions below do nothing otherwise.
int64_t sparring_has_tiles() { return permitted(); }

// weight [M, K] row-major -> panels; columns past M and k past K hold zeros.
void sparring_pack_bf16(const uint16_t *weight, uint16_t *panels, int64_t M, int64_t K, int threads) {
    int64_t depth = padded(K), num_panels = blocks_of(M, PANEL);
    parallel_for(num_panels, threads, [=](int64_t panel) {
        uint16_t *out = panels + panel * depth * PANEL;
        for (int64_t strip = 0; strip < depth; strip += DEPTH)
            for (int64_t m = 0; m < PANEL; m++) {
                int64_t row = panel * PANEL + m;
                for (int64_t k = strip; k < strip + DEPTH; k++)
                    out[k / 2 * PANEL * 2 + m * 2 + k % 2] = row < M && k < K ? weight[row * K + k] : 0;
            }
    });
}

// x [N, depth], depth a multiple of 32 (zeros past K) -> y [N, M], float32 when `wide`, else bfloat16.
void sparring_linear_bf16(const bf16 *x, const bf16 *panels, const float *bias, void *y, int wide, int64_t N, int64_t M,
                          int64_t depth, int threads) {
    Product w{x, panels, bias, N, M, depth};
    if (wide) product(w, (float *)y, threads);
    else product(w, (bf16 *)y, threads);
}

}  // extern "C"
}  // namespace sparring
