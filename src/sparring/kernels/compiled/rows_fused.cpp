// Neighbouring row operations in one pass, for training: addition and norm, the split into heads with norm and
// rotation, SiLU times up; and their gradients. A value is rounded wherever the separate operations would store it, so
// the forward bits are theirs. Inputs that one matrix product made lie side by side in its rows, and so do their
// gradients.
#include <vector>

#include "parallel.h"
#include "rows.h"

namespace sparring {
namespace {

constexpr int64_t FUSED_GRAIN = 16384;  // elements; waking a second thread for fewer costs more than the work
constexpr int64_t ROWS_PER_SUM = 64;    // the gradient of a norm weight is summed in partials of so many rows

// sum = x + y, h = weight * norm(sum).
template <class T>
static void add_rms_norm(const T *x, const T *y, const T *weight, T *sum, T *h, int64_t N, int64_t D, float eps,
                         int threads) {
    parallel_ranges(N, blocks_of(FUSED_GRAIN, D), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            T *out = sum + n * D;
            for (int64_t i = 0; i < D; i += LANES)
                store_tail(out + i, D - i, load_tail(x + n * D + i, D - i) + load_tail(y + n * D + i, D - i));
            rms_norm_row(out, weight, h + n * D, D, eps);
        }
    });
}

// dx = r w dy - x r^3 / D sum(w dy x), r the inverse root mean square; `also` (or null) is added to it. dw [D] += dy x
// r.
template <class T>
static inline void rms_norm_row_backward(const T *x, const T *weight, const T *dy, const T *also, T *dx, float *dw,
                                         int64_t D, float eps) {
    v16 squares = splat(0.0f), dot = splat(0.0f);
    for (int64_t i = 0; i < D; i += LANES) {
        v16 a = load_tail(x + i, D - i);
        squares = fma(a, a, squares);
        dot = fma(load_tail(weight + i, D - i) * load_tail(dy + i, D - i), a, dot);
    }
    float r = 1.0f / std::sqrt(lane_sum(squares) / (float)D + eps);
    v16 inverse = splat(r), pull = splat(-r * r * r * lane_sum(dot) / (float)D);
    for (int64_t i = 0; i < D; i += LANES) {
        v16 a = load_tail(x + i, D - i), g = load_tail(dy + i, D - i);
        v16 out = fma(a, pull, load_tail(weight + i, D - i) * g * inverse);
        store_tail(dx + i, D - i, also ? out + load_tail(also + i, D - i) : out);
        store_tail(dw + i, D - i, fma(g, a * inverse, load_tail(dw + i, D - i)));
    }
}

// body(first, last, dw) for all rows; dw [width] is what these rows add their weight gradients to. partial [ceil(N /
// ROWS_PER_SUM)][width]; the whole sum ends up in its first row, whatever the thread count.
template <class Body>
static void rows_with_weights(int64_t N, int64_t width, int64_t elements_per_row, float *partial, int threads,
                              Body body) {
    int64_t chunks = blocks_of(N, ROWS_PER_SUM);
    parallel_for(chunks, N * elements_per_row < FUSED_GRAIN ? 1 : threads, [=](int64_t chunk) {
        float *dw = partial + chunk * width;
        memset(dw, 0, width * sizeof(float));
        body(chunk * ROWS_PER_SUM, smaller(N, (chunk + 1) * ROWS_PER_SUM), dw);
    });
    for (int64_t chunk = 1; chunk < chunks; chunk++)
        for (int64_t i = 0; i < width; i += LANES)
            store_tail(partial + i, width - i,
                       load_tail(partial + i, width - i) + load_tail(partial + chunk * width + i, width - i));
}

// dx, the gradient of x and of y alike, from dsum (or null) and dh.
template <class T>
static void add_rms_norm_backward(const T *sum, const T *weight, const T *dsum, const T *dh, T *dx, float *partial,
                                  int64_t N, int64_t D, float eps, int threads) {
    rows_with_weights(N, D, D, partial, threads, [=](int64_t first, int64_t last, float *dw) {
        for (int64_t n = first; n < last; n++)
            rms_norm_row_backward(sum + n * D, weight, dh + n * D, dsum ? dsum + n * D : nullptr, dx + n * D, dw, D,
                                  eps);
    });
}

// How rows [H + 2 G][d], `stride` apart, split into queries, keys and values. The norm weights [d] may both be null.
template <class T> struct Heads {
    const T *rows, *q_weight, *k_weight, *cos, *sin;
    int64_t stride, N, H, G, d;
    float eps;
};

template <class T> static void split_heads(const Heads<T> &s, T *q, T *k, T *v, int threads) {
    int64_t d = s.d;
    parallel_ranges(s.N, blocks_of(FUSED_GRAIN, (s.H + 2 * s.G) * d), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            const T *row = s.rows + n * s.stride, *c = s.cos + n * d, *sine = s.sin + n * d;
            for (int64_t h = 0; h < s.H + s.G; h++) {
                T *out = h < s.H ? q + (n * s.H + h) * d : k + (n * s.G + h - s.H) * d;
                const T *in = row + h * d, *weight = h < s.H ? s.q_weight : s.k_weight;
                if (weight) rms_norm_row(in, weight, out, d, s.eps), in = out;
                rotate(in, c, sine, out, d / 2, false);
            }
            memcpy(v + n * s.G * d, row + (s.H + s.G) * d, s.G * d * sizeof(T));
        }
    });
}

// drows [N][(H + 2 G) d] without gaps; partial as in rows_with_weights with the two weights side by side, or null
// without norms.
template <class T>
static void split_heads_backward(const Heads<T> &s, const T *dq, const T *dk, const T *dv, T *drows, float *partial,
                                 int threads) {
    int64_t d = s.d, width = (s.H + 2 * s.G) * d;
    auto body = [=](int64_t first, int64_t last, float *dw) {
        std::vector<T> straight(d);
        for (int64_t n = first; n < last; n++) {
            const T *row = s.rows + n * s.stride, *c = s.cos + n * d, *sine = s.sin + n * d;
            T *out = drows + n * width;
            for (int64_t h = 0; h < s.H + s.G; h++) {
                bool query = h < s.H;
                const T *grad = query ? dq + (n * s.H + h) * d : dk + (n * s.G + h - s.H) * d;
                const T *weight = query ? s.q_weight : s.k_weight, *none = nullptr;
                rotate(grad, c, sine, weight ? straight.data() : out + h * d, d / 2, true);
                if (weight)
                    rms_norm_row_backward(row + h * d, weight, straight.data(), none, out + h * d, query ? dw : dw + d,
                                          d, s.eps);
            }
            memcpy(out + (s.H + s.G) * d, dv + n * s.G * d, s.G * d * sizeof(T));
        }
    };
    if (partial) return rows_with_weights(s.N, 2 * d, width, partial, threads, body);
    parallel_ranges(s.N, blocks_of(FUSED_GRAIN, width), threads,
                    [=](int64_t first, int64_t last) { body(first, last, nullptr); });
}

// Rows [gate, up] of 2 I elements, `stride` apart -> silu(gate) * up, [N][I].
template <class T> static void swiglu(const T *rows, int64_t stride, T *y, int64_t N, int64_t I, int threads) {
    parallel_ranges(N, blocks_of(FUSED_GRAIN, I), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) swiglu_row(rows + n * stride, y + n * I, I);
    });
}

// drows [N][2 I] without gaps.
template <class T>
static void swiglu_backward(const T *rows, int64_t stride, const T *dy, T *drows, int64_t N, int64_t I, int threads) {
    parallel_ranges(N, blocks_of(FUSED_GRAIN, I), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            const T *gate = rows + n * stride, *up = gate + I;
            T *dgate = drows + n * 2 * I, *dup = dgate + I;
            for (int64_t i = 0; i < I; i += LANES) {
                v16 a = load_tail(gate + i, I - i), g = load_tail(dy + n * I + i, I - i), s = sigmoid(a), gs = g * s;
                store_tail(dup + i, I - i, gs * a);
                store_tail(dgate + i, I - i, gs * load_tail(up + i, I - i) * fma(a, splat(1.0f) - s, splat(1.0f)));
            }
        }
    });
}

}  // namespace

#define SPARRING_ROWS_FUSED(NAME, T)                                                                                   \
    void sparring_add_rms_norm_##NAME(const T *x, const T *y, const T *weight, T *sum, T *h, int64_t N, int64_t D,     \
                                      float eps, int threads) {                                                        \
        add_rms_norm(x, y, weight, sum, h, N, D, eps, threads);                                                        \
    }                                                                                                                  \
    void sparring_add_rms_norm_backward_##NAME(const T *sum, const T *weight, const T *dsum, const T *dh, T *dx,       \
                                               float *partial, int64_t N, int64_t D, float eps, int threads) {         \
        add_rms_norm_backward(sum, weight, dsum, dh, dx, partial, N, D, eps, threads);                                 \
    }                                                                                                                  \
    void sparring_split_heads_##NAME(const T *rows, const T *q_weight, const T *k_weight, const T *cos, const T *sin,  \
                                     T *q, T *k, T *v, int64_t stride, int64_t N, int64_t H, int64_t G, int64_t d,     \
                                     float eps, int threads) {                                                         \
        split_heads(Heads<T>{rows, q_weight, k_weight, cos, sin, stride, N, H, G, d, eps}, q, k, v, threads);          \
    }                                                                                                                  \
    void sparring_split_heads_backward_##NAME(const T *rows, const T *q_weight, const T *k_weight, const T *cos,       \
                                              const T *sin, const T *dq, const T *dk, const T *dv, T *drows,           \
                                              float *partial, int64_t stride, int64_t N, int64_t H, int64_t G,         \
                                              int64_t d, float eps, int threads) {                                     \
        Heads<T> heads{rows, q_weight, k_weight, cos, sin, stride, N, H, G, d, eps};                                   \
        split_heads_backward(heads, dq, dk, dv, drows, partial, threads);                                              \
    }                                                                                                                  \
    void sparring_swiglu_##NAME(const T *rows, T *y, int64_t stride, int64_t N, int64_t I, int threads) {              \
        swiglu(rows, stride, y, N, I, threads);                                                                        \
    }                                                                                                                  \
    void sparring_swiglu_backward_##NAME(const T *rows, const T *dy, T *drows, int64_t stride, int64_t N, int64_t I,   \
                                         int threads) {                                                                \
        swiglu_backward(rows, stride, dy, drows, N, I, threads);                                                       \
    }

extern "C" {
SPARRING_ROWS_FUSED(f32, float)
SPARRING_ROWS_FUSED(bf16, bf16)
}
}  // namespace sparring
