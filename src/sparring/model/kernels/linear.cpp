// y = x W^T + bias in float32, and the packing of W.
//
// A weight [M, K] is stored as panels [ceil(M / 64)][K][64]. An element of y is a sum of partial sums, one for each
// block of 128 consecutive k, each an ascending chain of fused multiply-adds from zero; the blocks are added in order,
// then the bias. Rows and panels are cut into tiles for cache and threads; no cut goes through a chain.
#include "parallel.h"
#include "tile.h"

namespace sparring {
namespace {

constexpr int PANEL = 64;
constexpr int64_t K_BLOCK = 128;  // 128 x 64 floats of a panel are 32 KiB: they stay in the first-level cache
constexpr int64_t ROWS_PER_TASK = 192;
constexpr int64_t PREFETCH = 32;  // k steps ahead, when few rows make the panels the bottleneck

struct Product {
    const float *x, *panels, *bias;
    float *y;
    int64_t N, M, K;
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
static void finish(const Product &w, const float *total, int64_t first_row, int64_t rows, int64_t panel) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = panel * PANEL, i = 0; i < PANEL && column < w.M; i += LANES, column += LANES) {
            v16 sum = load(total + row * PANEL + i);
            if (w.bias) sum = sum + load_tail(w.bias + column, w.M - column);
            store_tail(w.y + (first_row + row) * w.M + column, w.M - column, sum);
        }
}

static void run(const Product &w, int64_t first_row, int64_t rows, int64_t panel) {
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

}  // namespace

extern "C" {

// weight [M, K] row-major -> panels; columns past M hold zeros.
void sparring_pack_f32(const float *weight, float *panels, int64_t M, int64_t K, int threads) {
    int64_t num_panels = blocks_of(M, PANEL), num_strips = blocks_of(K, LANES);
    parallel_for(num_panels, threads, [=](int64_t panel) {
        int64_t rows = smaller(M - panel * PANEL, PANEL);
        for (int64_t strip = 0; strip < num_strips; strip++) {
            float *out = panels + (panel * K + strip * LANES) * PANEL;
            int64_t depth = smaller(K - strip * LANES, LANES);
            for (int64_t m = 0; m < PANEL; m++) {
                const float *in = weight + (panel * PANEL + m) * K + strip * LANES;
                for (int64_t k = 0; k < depth; k++) out[k * PANEL + m] = m < rows ? in[k] : 0.0f;
            }
        }
    });
}

// x [N, K] contiguous, bias [M] or null -> y [N, M] contiguous.
void sparring_linear_f32(const float *x, const float *panels, const float *bias, float *y, int64_t N, int64_t M,
                         int64_t K, int threads) {
    Product w{x, panels, bias, y, N, M, K};
    int64_t num_panels = blocks_of(M, PANEL), rows = ROWS_PER_TASK;
    if (2 * N * M * K < 2000000) threads = 1;  // about as long as waking a sleeping second thread takes
    while (rows > TILE_ROWS && num_panels * blocks_of(N, rows) < 4 * threads) rows = blocks_of(rows / 2, TILE_ROWS) * TILE_ROWS;
    parallel_for(num_panels * blocks_of(N, rows), threads, [=](int64_t t) {
        int64_t row = t / num_panels * rows;
        run(w, row, smaller(rows, N - row), t % num_panels);
    });
}

}  // extern "C"
}  // namespace sparring
