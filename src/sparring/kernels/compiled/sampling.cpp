// Log-probabilities, entropies and samples of rows of float32 logits. See sampling.h for the order of the arithmetic.
#include <functional>

#include "parallel.h"
#include "sampling.h"

namespace sparring {
namespace {

constexpr int64_t GRAIN = 8192;  // logits; waking a second thread for fewer costs more than the work

// A row of logits, or what is kept of it (then `ids`), and the target's place in it.
struct Row {
    const float *logits;
    int64_t V, target;
    const int32_t *ids;
};

// Row n is limited to ids[offsets[n]:offsets[n + 1]], ascending; to nothing where these are none or offsets are null.
struct KeptSets {
    const int64_t *offsets;
    const int32_t *ids;

    bool fits(int64_t n, int64_t target, int64_t V) const {
        if (target < 0 || target >= V) return false;
        if (!offsets || offsets[n] == offsets[n + 1]) return true;
        const int32_t *begin = ids + offsets[n], *end = ids + offsets[n + 1];
        return begin < end && begin[0] >= 0 && end[-1] < V && std::is_sorted(begin, end, std::less_equal<int32_t>()) &&
               std::binary_search(begin, end, (int32_t)target);
    }

    // Valid until this thread asks for another one.
    Row row(int64_t n, const float *logits, int64_t target, int64_t V) const {
        if (!offsets || offsets[n] == offsets[n + 1]) return {logits, V, target, nullptr};
        static thread_local Kept kept;
        const int32_t *begin = ids + offsets[n], *end = ids + offsets[n + 1];
        kept.gather(logits, begin, end - begin);
        return {kept.logits.data(), end - begin, std::lower_bound(begin, end, (int32_t)target) - begin, begin};
    }
};

}  // namespace

extern "C" {

// maximum and log_sum [N] are what the backward pass needs. kept_offsets [N + 1] and kept_ids say what each row was
// limited to; both may be null. Returns the first row whose target is no token, or none that was kept, or whose ids do
// not ascend; or -1.
int64_t sparring_token_logprobs(const float *logits, const int64_t *targets, const float *temperature,
                                const int64_t *kept_offsets, const int32_t *kept_ids, float *logprob, float *entropy,
                                float *maximum, float *log_sum, int64_t N, int64_t V, int threads) {
    KeptSets sets{kept_offsets, kept_ids};
    for (int64_t n = 0; n < N; n++)
        if (!sets.fits(n, targets[n], V)) return n;
    parallel_ranges(N, blocks_of(GRAIN, V), threads, [=](int64_t first, int64_t last) {
        for (int64_t n = first; n < last; n++) {
            Row row = sets.row(n, logits + n * V, targets[n], V);
            Statistics s = statistics(row.logits, row.V, temperature[n], nullptr);
            logprob[n] = logprob_of(s, row.logits[row.target]);
            entropy[n] = (float)(std::log(s.sum) - s.weighted / s.sum);
            maximum[n] = s.maximum;
            log_sum[n] = s.log_sum();
        }
    });
    return -1;
}

// d logprob / d z_v = 1[v = target] - p_v; d entropy / d z_v = -p_v (log p_v + entropy); z = logits / temperature.
// grad_entropy may be null, kept_offsets and kept_ids as in the forward pass.
void sparring_token_logprobs_backward(const float *logits, const int64_t *targets, const float *temperature,
                                      const int64_t *kept_offsets, const int32_t *kept_ids, const float *entropy,
                                      const float *maximum, const float *log_sum, const float *grad_logprob,
                                      const float *grad_entropy, float *grad, int64_t N, int64_t V, int threads) {
    KeptSets sets{kept_offsets, kept_ids};
    parallel_ranges(N, blocks_of(GRAIN, V), threads, [=](int64_t first, int64_t last) {
        std::vector<float> narrow;
        for (int64_t n = first; n < last; n++) {
            Row row = sets.row(n, logits + n * V, targets[n], V);
            if (row.ids) narrow.resize(row.V);
            float *out = row.ids ? narrow.data() : grad + n * V;
            float inverse = inverse_temperature(temperature[n]), by_entropy = grad_entropy ? grad_entropy[n] : 0.0f;
            v16 scale = splat(inverse), shift = splat(maximum[n]), log_z = splat(log_sum[n]);
            v16 by_logprob = splat(-grad_logprob[n]), slope = splat(-by_entropy), h = splat(entropy[n]);
            const v16 floor = splat(-1e30f);  // keeps 0 * log 0 at 0 for logits of minus infinity
            for (int64_t i = 0; i < row.V; i += LANES) {
                v16 log_p = load_tail(row.logits + i, row.V - i) * scale - shift - log_z;
                v16 p = exp(log_p), g = fma(slope, max(log_p, floor) + h, by_logprob);
                store_tail(out + i, row.V - i, p * g * scale);
            }
            out[row.target] += grad_logprob[n] * inverse;
            if (!row.ids) continue;
            std::fill(grad + n * V, grad + (n + 1) * V, 0.0f);
            for (int64_t i = 0; i < row.V; i++) grad[n * V + row.ids[i]] = narrow[i];
        }
    });
}

// masks [N][ceil(V / 64)], zero at first, or null: see `sample_row`.
void sparring_sample(const float *logits, const float *temperature, const int64_t *top_k, const float *top_p,
                     const float *min_p, const uint64_t *seeds, const int64_t *positions, const uint8_t *limited,
                     int64_t *tokens, float *logprobs, uint64_t *masks, int64_t N, int64_t V, int threads) {
    parallel_for(N, N * V < GRAIN ? 1 : threads, [=](int64_t n) {
        Request request{temperature[n], top_p[n], min_p[n], top_k[n], seeds[n], positions[n], limited[n] != 0};
        Draw draw{logprobs + n, masks ? masks + n * blocks_of(V, 64) : nullptr};
        tokens[n] = sample_row(logits + n * V, V, request, draw);
    });
}

}  // extern "C"
}  // namespace sparring
