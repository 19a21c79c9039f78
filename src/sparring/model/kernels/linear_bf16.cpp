// y = x W^T + bias for bfloat16 on processors with AMX tiles; others widen the weight and use linear.cpp.
//
// A weight [M, K] is stored as panels [ceil(M / 64)][depth / 2][64][2], depth = K rounded up to 32 with zeros: pairs of k
// next to each other, as TDPBF16PS reads them. That instruction adds, for each element of a tile, 16 pairs of products in
// ascending order to a float32 sum; it never mixes rows. An element of y is one such chain over all of K, then the bias,
// then one rounding, whatever the rows around it.
#include "linear.h"
#include "parallel.h"

namespace sparring {
namespace {

#ifdef SPARRING_AMX
template <class T> static void product(const TileProduct &w, T *y, int64_t N, int threads) {
    int64_t num_panels = blocks_of(w.M, PANEL), rows = ROWS_PER_TASK;
    if (w.M * w.depth < 200000 && N * w.M * w.depth < 4000000) threads = 1;
    while (rows > 2 * TILE && num_panels * blocks_of(N, rows) < 4 * threads) rows = blocks_of(rows / 2, 2 * TILE) * 2 * TILE;
    parallel_for(num_panels * blocks_of(N, rows), threads, [=](int64_t t) {
        int64_t row = t / num_panels * rows;
        run_tiles(w, y, row, smaller(row + rows, N), t % num_panels);
    });
}
#else
template <class T> static void product(const TileProduct &, T *, int64_t, int) {}
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
    TileProduct w{x, panels, bias, M, depth, M};
    if (wide) product(w, (float *)y, N, threads);
    else product(w, (bf16 *)y, N, threads);
}

}  // extern "C"
}  // namespace sparring
