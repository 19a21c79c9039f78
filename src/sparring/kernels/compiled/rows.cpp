// Operations within one row: RMS norm, SiLU, SiLU times up, tanh, rotary embedding; and their gradients.
// T is float or bf16; arithmetic is float32 and rounds once where the result is stored.
#include "parallel.h"
#include "rows.h"

namespace sparring {
namespace {

constexpr int64_t GRAIN = 16384;  // elements; waking a second thread for fewer costs more than the work
constexpr int64_t ROWS_PER_PARTIAL = 64;  // the gradient of a norm weight is summed in partials of so many rows

template <class T>
static void rms_norm(const T *x, const T *weight, T *y, int64_t N, int64_t D, float eps, int threads) {
    parallel_ranges(N, blocks_of(GRAIN, D), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) rms_norm_row(x + n * D, weight, y + n * D, D, eps);
    });
}

// dx = r w dy - x r^3 / D sum(w dy x), r the inverse root mean square; dw = sum over rows of dy x r, in partial sums of
// ROWS_PER_PARTIAL rows, so that the thread count does not enter. partial [ceil(N / ROWS_PER_PARTIAL)][D]; dw ends up
// in its first row.
template <class T>
static void rms_norm_backward(const T *x, const T *weight, const T *dy, T *dx, float *partial, int64_t N, int64_t D,
                              float eps, int threads) {
    int64_t chunks = blocks_of(N, ROWS_PER_PARTIAL);
    parallel_for(chunks, N * D < GRAIN ? 1 : threads, [=](int64_t chunk) {
        float *dw = partial + chunk * D;
        memset(dw, 0, D * sizeof(float));
        for (int64_t n = chunk * ROWS_PER_PARTIAL; n < smaller(N, (chunk + 1) * ROWS_PER_PARTIAL); n++) {
            const T *in = x + n * D, *g = dy + n * D;
            float r = inverse_rms(in, D, eps);
            v16 dot = splat(0.0f);
            for (int64_t i = 0; i < D; i += LANES)
                dot = fma(load_tail(weight + i, D - i) * load_tail(g + i, D - i), load_tail(in + i, D - i), dot);
            v16 inverse = splat(r), pull = splat(-r * r * r * lane_sum(dot) / (float)D);
            for (int64_t i = 0; i < D; i += LANES) {
                v16 a = load_tail(in + i, D - i), grad = load_tail(g + i, D - i);
                v16 out = fma(a, pull, load_tail(weight + i, D - i) * grad * inverse);
                store_tail(dx + n * D + i, D - i, out);
                store_tail(dw + i, D - i, fma(grad, a * inverse, load_tail(dw + i, D - i)));
            }
        }
    });
    for (int64_t chunk = 1; chunk < chunks; chunk++)
        for (int64_t i = 0; i < D; i += LANES)
            store_tail(partial + i, D - i, load_tail(partial + i, D - i) + load_tail(partial + chunk * D + i, D - i));
}

// Elements in strips of 16 from the start of the tensor: lanes are independent, so bits do not depend on the position.
template <class T, class F> static void elementwise(int64_t count, int threads, F body) {
    parallel_ranges(blocks_of(count, LANES), GRAIN / LANES, threads, [=](int64_t first, int64_t last) {
        for (int64_t i = first * LANES; i < smaller(last * LANES, count); i += LANES)
            body(i, smaller(count - i, LANES));
    });
}

// up may be null (plain SiLU).
template <class T> static void silu_mul(const T *gate, const T *up, T *y, int64_t count, int threads) {
    elementwise<T>(count, threads,
                   [=](int64_t i, int64_t n) { silu_mul_strip(gate + i, up ? up + i : nullptr, y + i, n); });
}

template <class T>
static void silu_mul_backward(const T *gate, const T *up, const T *dy, T *dgate, T *dup, int64_t count, int threads) {
    elementwise<T>(count, threads, [=](int64_t i, int64_t n) {
        v16 a = load_tail(gate + i, n), g = load_tail(dy + i, n), s = sigmoid(a);
        if (up) {
            store_tail(dup + i, n, g * a * s);
            g = g * load_tail(up + i, n);
        }
        store_tail(dgate + i, n, g * s * fma(a, splat(1.0f) - s, splat(1.0f)));
    });
}

static void tanh_all(const float *x, float *y, int64_t count, int threads) {
    elementwise<float>(count, threads, [=](int64_t i, int64_t n) { store_tail(y + i, n, tanh(load_tail(x + i, n))); });
}

template <class T>
static void rope(const T *x, const T *cos, const T *sin, T *y, int64_t N, int64_t H, int64_t d, int transposed,
                 int threads) {
    int64_t half = d / 2;
    parallel_ranges(N, blocks_of(GRAIN, H * d), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            const T *c = cos + n * d, *s = sin + n * d;
            for (int64_t h = 0; h < H; h++) rotate(x + (n * H + h) * d, c, s, y + (n * H + h) * d, half, transposed);
        }
    });
}

}  // namespace

#define SPARRING_ROWS(NAME, T)                                                                                         \
    void sparring_rms_norm_##NAME(const T *x, const T *weight, T *y, int64_t N, int64_t D, float eps, int threads) {   \
        rms_norm(x, weight, y, N, D, eps, threads);                                                                    \
    }                                                                                                                  \
    void sparring_rms_norm_backward_##NAME(const T *x, const T *weight, const T *dy, T *dx, float *partial, int64_t N, \
                                           int64_t D, float eps, int threads) {                                        \
        rms_norm_backward(x, weight, dy, dx, partial, N, D, eps, threads);                                             \
    }                                                                                                                  \
    void sparring_silu_mul_##NAME(const T *gate, const T *up, T *y, int64_t count, int threads) {                      \
        silu_mul(gate, up, y, count, threads);                                                                         \
    }                                                                                                                  \
    void sparring_silu_mul_backward_##NAME(const T *gate, const T *up, const T *dy, T *dgate, T *dup, int64_t count,   \
                                           int threads) {                                                              \
        silu_mul_backward(gate, up, dy, dgate, dup, count, threads);                                                   \
    }                                                                                                                  \
    void sparring_rope_##NAME(const T *x, const T *cos, const T *sin, T *y, int64_t N, int64_t H, int64_t d,           \
                              int transposed, int threads) {                                                           \
        rope(x, cos, sin, y, N, H, d, transposed, threads);                                                            \
    }

extern "C" {
SPARRING_ROWS(f32, float)
SPARRING_ROWS(bf16, bf16)
void sparring_tanh(const float *x, float *y, int64_t count, int threads) { tanh_all(x, y, count, threads); }
}
}  // namespace sparring
