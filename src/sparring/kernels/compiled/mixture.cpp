// Routers and experts as operations of their own.
#include "mixture.h"

namespace sparring {
namespace {

constexpr int64_t ROUTE_GRAIN = 64;        // rows
constexpr int64_t WORK_OF_A_THREAD = 1000000;  // multiplications; waking a thread for fewer costs more
constexpr int64_t SCRATCH = 16 << 20;      // elements between the products of a block of rows, which a thread keeps

template <class T>
static void mixture(const Experts &w, const T *x, const int32_t *chosen, const float *shares, T *y, int64_t N,
                    int64_t k, int threads) {
    if (N * k * 3 * w.down.M * w.down.K < WORK_OF_A_THREAD) threads = 1;
    int64_t D = w.gate_up.K, block = larger(1, SCRATCH / (k * (2 * D + 3 * w.down.K)));
    for (int64_t n = 0; n < N; n += block)
        mix_rows(w, x + n * D, chosen + n * k, shares + n * k, y + n * D, smaller(block, N - n), k, threads,
                 [](auto...) {});
}

}  // namespace

extern "C" {

// logits [N][E] -> chosen and shares [N][k].
void sparring_route(const float *logits, int32_t *chosen, float *shares, int64_t N, int64_t E, int64_t k,
                    int renormalised, int threads) {
    parallel_ranges(N, ROUTE_GRAIN, threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++)
            route_row(logits + n * E, E, k, renormalised, chosen + n * k, shares + n * k);
    });
}

void sparring_mixture_f32(const Experts *w, const float *x, const int32_t *chosen, const float *shares, float *y,
                          int64_t N, int64_t k, int threads) {
    mixture(*w, x, chosen, shares, y, N, k, threads);
}

void sparring_mixture_bf16(const Experts *w, const bf16 *x, const int32_t *chosen, const float *shares, bf16 *y,
                           int64_t N, int64_t k, int threads) {
    mixture(*w, x, chosen, shares, y, N, k, threads);
}
}
}  // namespace sparring
