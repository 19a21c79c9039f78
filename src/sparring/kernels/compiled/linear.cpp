// y = x W^T + bias with sums in float32, and the packing of W.
//
// A weight [M, K] is stored as panels [ceil(M / 64)][K][64], of its own type. An element of y is a sum of partial sums,
// one for each block of 128 consecutive k, each an ascending chain of fused multiply-adds from zero; the blocks are
// added in order, then the bias. Rows and panels are cut into tiles for cache and threads; no cut goes through a chain.
// Where the processor multiplies pairs of bfloat16, all of that may count pairs: panels [ceil(M / 64)][ceil(K /
// 2)][64][2].
#include "linear.h"

namespace sparring {

constexpr int64_t OPERATIONS_OF_ONE = 2000000;  // about as long as waking a sleeping second thread takes

template <class P, class X, class Y>
static void linear(const X *x, const P *panels, const float *bias, Y *y, int64_t N, int64_t M, int64_t K, int threads) {
    PanelProduct<Y, P, X> w{x, panels, bias, y, M, K, M};
    int64_t num_panels = blocks_of(M, PANEL), rows = ROWS_PER_TASK;
    if (2 * N * M * K < OPERATIONS_OF_ONE) threads = 1;
    while (rows > TILE_ROWS && num_panels * blocks_of(N, rows) < 4 * threads)
        rows = blocks_of(rows / 2, TILE_ROWS) * TILE_ROWS;
    parallel_for(num_panels * blocks_of(N, rows), threads, [=](int64_t t) {
        int64_t row = t / num_panels * rows;
        run_panel(w, row, smaller(rows, N - row), t % num_panels);
    });
}

// Rows of x and y, sorted by weight: weight e has the rows from ends[e - 1] to ends[e].
template <class T>
static void linear_groups(const T *x, const Weight &first_of, T *y, const int64_t *ends, int64_t E, int threads) {
    struct Piece { int64_t weight, first, last; };
    std::vector<Piece> pieces;
    for (int64_t e = 0, first = 0; e < E; first = ends[e++])
        for (; first < ends[e]; first += ROWS_PER_TASK)
            pieces.push_back({e, first, smaller(first + ROWS_PER_TASK, ends[e])});
    if (pieces.empty()) return;
    int64_t M = first_of.M, K = first_of.K;
    if (2 * ends[E - 1] * M * K < OPERATIONS_OF_ONE) threads = 1;
    int64_t count = pieces.size(), panels_each = blocks_of(M, PANEL);
    int64_t parts = threads == 1 ? 1 : smaller(panels_each, blocks_of(4 * threads, count));
    parallel_for(count * parts, threads, [&](int64_t i) {
        const Piece &piece = pieces[i / parts];
        int64_t part = i % parts, begin = panels_each * part / parts, end = panels_each * (part + 1) / parts;
        T *out = y + piece.first * M + begin * PANEL;
        linear_rows(columns_of(nth(first_of, piece.weight), begin, end), x + piece.first * K, out, M,
                    piece.last - piece.first);
    });
}

extern "C" {

// x [N, K] -> y [N, M], each row with its own weight; `first_of` is the first of E, with biases [E, M] or none.
void sparring_linear_groups_f32(const float *x, const Weight *first_of, float *y, const int64_t *ends, int64_t E,
                                int threads) {
    linear_groups(x, *first_of, y, ends, E, threads);
}

void sparring_linear_groups_bf16(const bf16 *x, const Weight *first_of, bf16 *y, const int64_t *ends, int64_t E,
                                 int threads) {
    linear_groups(x, *first_of, y, ends, E, threads);
}

// weight [M, K] row-major -> panels; columns past M hold zeros.
void sparring_pack_f32(const float *weight, float *panels, int64_t M, int64_t K, int threads) {
    pack_columns(weight, panels, M, K, K, PANEL, threads);
}

void sparring_pack_panels_bf16(const bf16 *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    pack_columns(weight, panels, M, K, K, PANEL, threads);
}

void sparring_pack_pairs(const bf16 *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    pack_pairs(weight, panels, M, K, blocks_of(K, 2), PANEL, threads);
}

// x [N, K] contiguous, bias [M] or null -> y [N, M] contiguous.
void sparring_linear_f32(const float *x, const float *panels, const float *bias, float *y, int64_t N, int64_t M,
                         int64_t K, int threads) {
    linear(x, panels, bias, y, N, M, K, threads);
}

void sparring_linear_panels_bf16(const float *x, const bf16 *panels, const float *bias, float *y, int64_t N, int64_t M,
                                 int64_t K, int threads) {
    linear(x, panels, bias, y, N, M, K, threads);
}

// 1 when this build multiplies pairs; the function below does nothing otherwise.
#ifdef SPARRING_PAIRS
int64_t sparring_has_pairs() { return 1; }

// y is float32 when `wide`, else bfloat16.
void sparring_linear_pairs(const bf16 *x, const bf16 *panels, const float *bias, void *y, int wide, int64_t N,
                           int64_t M, int64_t K, int threads) {
    const pair *in = (const pair *)even_rows(x, N, K), *weight = (const pair *)panels;
    if (wide) linear(in, weight, bias, (float *)y, N, M, blocks_of(K, 2), threads);
    else linear(in, weight, bias, (bf16 *)y, N, M, blocks_of(K, 2), threads);
}
#else
int64_t sparring_has_pairs() { return 0; }
void sparring_linear_pairs(const bf16 *, const bf16 *, const float *, void *, int, int64_t, int64_t, int64_t, int) {}
#endif

}  // extern "C"
}  // namespace sparring
