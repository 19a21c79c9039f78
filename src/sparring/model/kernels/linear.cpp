// y = x W^T + bias in float32, and the packing of W.
//
// A weight [M, K] is stored as panels [ceil(M / 64)][K][64], of its own type. An element of y is a sum of partial sums, one for
// each block of 128 consecutive k, each an ascending chain of fused multiply-adds from zero; the blocks are added in order,
// then the bias. Rows and panels are cut into tiles for cache and threads; no cut goes through a chain.
#include "linear.h"
#include "parallel.h"

namespace sparring {

template <class P> static void pack(const P *weight, P *panels, int64_t M, int64_t K, int threads) {
    int64_t num_panels = blocks_of(M, PANEL), num_strips = blocks_of(K, LANES);
    parallel_for(num_panels, threads, [=](int64_t panel) {
        int64_t rows = smaller(M - panel * PANEL, PANEL);
        for (int64_t strip = 0; strip < num_strips; strip++) {
            P *out = panels + (panel * K + strip * LANES) * PANEL;
            int64_t depth = smaller(K - strip * LANES, LANES);
            for (int64_t m = 0; m < PANEL; m++) {
                const P *in = weight + (panel * PANEL + m) * K + strip * LANES;
                for (int64_t k = 0; k < depth; k++) out[k * PANEL + m] = m < rows ? in[k] : P{};
            }
        }
    });
}

template <class P>
static void linear(const float *x, const P *panels, const float *bias, float *y, int64_t N, int64_t M, int64_t K, int threads) {
    PanelProduct<float, P> w{x, panels, bias, y, M, K, M};
    int64_t num_panels = blocks_of(M, PANEL), rows = ROWS_PER_TASK;
    if (2 * N * M * K < 2000000) threads = 1;  // about as long as waking a sleeping second thread takes
    while (rows > TILE_ROWS && num_panels * blocks_of(N, rows) < 4 * threads) rows = blocks_of(rows / 2, TILE_ROWS) * TILE_ROWS;
    parallel_for(num_panels * blocks_of(N, rows), threads, [=](int64_t t) {
        int64_t row = t / num_panels * rows;
        run_panel(w, row, smaller(rows, N - row), t % num_panels);
    });
}

extern "C" {

// weight [M, K] row-major -> panels; columns past M hold zeros.
void sparring_pack_f32(const float *weight, float *panels, int64_t M, int64_t K, int threads) {
    pack(weight, panels, M, K, threads);
}

void sparring_pack_panels_bf16(const bf16 *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    pack(weight, panels, M, K, threads);
}

// x [N, K] contiguous, bias [M] or null -> y [N, M] contiguous.
void sparring_linear_f32(const float *x, const float *panels, const float *bias, float *y, int64_t N, int64_t M, int64_t K,
                         int threads) {
    linear(x, panels, bias, y, N, M, K, threads);
}

void sparring_linear_panels_bf16(const float *x, const bf16 *panels, const float *bias, float *y, int64_t N, int64_t M, int64_t K,
                                 int threads) {
    linear(x, panels, bias, y, N, M, K, threads);
}

}  // extern "C"
}  // namespace sparring
