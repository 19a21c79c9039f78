// Log-probabilities, entropies and samples of rows of float32 logits. See sampling.h for the order of the arithmetic.
#include "parallel.h"
#include "sampling.h"

namespace sparring {
namespace {

constexpr int64_t GRAIN = 8192;  // logits; waking a second thread for fewer costs more than the work

}  // namespace

extern "C" {

// maximum and log_sum [N] are what the backward pass needs. Returns the first row whose target is no token, or -1.
int64_t sparring_token_logprobs(const float *logits, const int64_t *targets, const float *temperature, float *logprob,
                             float *entropy, float *maximum, float *log_sum, int64_t N, int64_t V, int threads) {
    for (int64_t n = 0; n < N; n++)
        if (targets[n] < 0 || targets[n] >= V) return n;
    parallel_ranges(N, blocks_of(GRAIN, V), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            const float *row = logits + n * V;
            Statistics s = statistics(row, V, temperature[n], nullptr);
            logprob[n] = logprob_of(s, row[targets[n]]);
            entropy[n] = (float)(std::log(s.sum) - s.weighted / s.sum);
            maximum[n] = s.maximum;
            log_sum[n] = s.log_sum();
        }
    });
    return -1;
}

// d logprob / d z_v = 1[v = target] - p_v; d entropy / d z_v = -p_v (log p_v + entropy); z = logits / temperature.
// grad_entropy may be null.
void sparring_token_logprobs_backward(const float *logits, const int64_t *targets, const float *temperature,
                                      const float *entropy, const float *maximum, const float *log_sum,
                                      const float *grad_logprob, const float *grad_entropy, float *grad, int64_t N,
                                      int64_t V, int threads) {
    parallel_ranges(N, blocks_of(GRAIN, V), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            float inverse = inverse_temperature(temperature[n]), by_entropy = grad_entropy ? grad_entropy[n] : 0.0f;
            v16 scale = splat(inverse), shift = splat(maximum[n]), log_z = splat(log_sum[n]);
            v16 by_logprob = splat(-grad_logprob[n]), slope = splat(-by_entropy), h = splat(entropy[n]);
            const v16 floor = splat(-1e30f);  // keeps 0 * log 0 at 0 for logits of minus infinity
            for (int64_t i = 0; i < V; i += LANES) {
                v16 log_p = load_tail(logits + n * V + i, V - i) * scale - shift - log_z;
                v16 p = exp(log_p), g = fma(slope, max(log_p, floor) + h, by_logprob);
                store_tail(grad + n * V + i, V - i, p * g * scale);
            }
            grad[n * V + targets[n]] += grad_logprob[n] * inverse;
        }
    });
}

void sparring_sample(const float *logits, const float *temperature, const int64_t *top_k, const float *top_p,
                     const uint64_t *seeds, const int64_t *positions, int64_t *tokens, float *logprobs, int64_t N,
                     int64_t V, int threads) {
    parallel_for(N, N * V < GRAIN ? 1 : threads, [=](int64_t n) {
        Request request{temperature[n], top_p[n], top_k[n], seeds[n], positions[n]};
        tokens[n] = sample_row(logits + n * V, V, request, logprobs + n);
    });
}

}  // extern "C"
}  // namespace sparring
