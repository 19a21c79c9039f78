// Log-probabilities, entropies and samples of a row of float32 logits. One function, `statistics`, gives the maximum and
// the normaliser of a row to all of them, so that a sampled token's log-probability and its recomputation agree to the bit.
//
// A row is cut into segments of 1024 logits. A segment's sum keeps 16 lanes and halves them; segments are added in
// ascending order in float64. Temperature 0 means greedy: probabilities are then those of temperature 1.
#pragma once

#include <algorithm>
#include <vector>

#include "tile.h"

namespace sparring {

constexpr int64_t SEGMENT = 1024;

struct Statistics {
    float maximum, inverse;  // of the scaled logits; 1 / temperature
    double sum, weighted;    // sum exp(z - max), sum exp(z - max) (z - max)
    float log_sum() const { return (float)std::log(sum); }
};

static inline float inverse_temperature(float temperature) { return temperature == 0.0f ? 1.0f : 1.0f / temperature; }

// exp(z - max) of one vector; lanes past the end are zero. `shifted` receives z - max (zero past the end).
static inline v16 weight_at(const float *row, int64_t i, int64_t V, v16 inverse, v16 maximum, v16 *shifted) {
    const float lowest = -std::numeric_limits<float>::infinity();
    v16 z = load_tail(row + i, V - i, lowest) * inverse - maximum;
    v16 weight = exp(z);
    *shifted = less_select(splat(lowest), z, z, splat(0.0f));
    return weight;
}

// segment_sums may be null; else [ceil(V / SEGMENT)].
static inline Statistics statistics(const float *row, int64_t V, float temperature, double *segment_sums) {
    const float lowest = -std::numeric_limits<float>::infinity();
    Statistics s{0.0f, inverse_temperature(temperature), 0.0, 0.0};
    v16 inverse = splat(s.inverse), best = splat(lowest);
    for (int64_t i = 0; i < V; i += LANES) best = max(best, load_tail(row + i, V - i, lowest) * inverse);
    s.maximum = lane_max(best);
    v16 maximum = splat(s.maximum);
    for (int64_t begin = 0; begin < V; begin += SEGMENT) {
        v16 sum = splat(0.0f), weighted = splat(0.0f);
        for (int64_t i = begin; i < smaller(begin + SEGMENT, V); i += LANES) {
            v16 shifted, weight = weight_at(row, i, V, inverse, maximum, &shifted);
            sum = sum + weight;
            weighted = fma(weight, shifted, weighted);
        }
        double part = lane_sum(sum);
        if (segment_sums) segment_sums[begin / SEGMENT] = part;
        s.sum += part;
        s.weighted += lane_sum(weighted);
    }
    return s;
}

static inline float logprob_of(const Statistics &s, float logit) { return logit * s.inverse - s.maximum - s.log_sum(); }

// Philox4x32-10 (Salmon et al. 2011): first word of the block with this key and counter.
static inline uint32_t philox(uint64_t key, uint64_t counter) {
    uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t next[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k0, (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k1, (uint32_t)a};
        memcpy(c, next, sizeof(c));
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c[0];
}

static inline double uniform(uint64_t seed, int64_t position) {
    return ((double)(philox(seed, (uint64_t)position) >> 8) + 0.5) / 16777216.0;
}

// The first token in id order whose cumulative weight passes u times the sum; never one of weight zero.
static inline int64_t invert(const float *row, int64_t V, const Statistics &s, const double *segment_sums, double u) {
    double goal = u * s.sum, before = 0.0;
    int64_t segment = 0, last_possible = 0, segments = blocks_of(V, SEGMENT);
    while (segment + 1 < segments && before + segment_sums[segment] <= goal) before += segment_sums[segment++];
    for (; segment < segments; segment++)
        for (int64_t i = segment * SEGMENT; i < smaller((segment + 1) * SEGMENT, V); i += LANES) {
            v16 shifted;
            alignas(64) float weights[LANES];
            store(weights, weight_at(row, i, V, splat(s.inverse), splat(s.maximum), &shifted));
            for (int64_t l = 0; l < smaller(LANES, V - i); l++) {
                if (weights[l] <= 0.0f) continue;
                before += weights[l];
                last_possible = i + l;
                if (before > goal) return last_possible;
            }
        }
    return last_possible;  // rounding left the last step short of the sum
}

struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate &other) const { return logit != other.logit ? logit > other.logit : id < other.id; }
};

// The kept tokens, best first (equal logits: lowest id first), with their weights: top-k, then the shortest prefix that
// holds top_p of what top-k left (Holtzman et al. 2020). At least one token is kept.
struct Kept {
    std::vector<Candidate> all;
    std::vector<double> weights;
    double sum;

    void choose(const float *row, int64_t V, const Statistics &s, int64_t top_k, double top_p) {
        all.resize(V);
        for (int64_t i = 0; i < V; i++) all[i] = {row[i], (int32_t)i};
        int64_t limit = top_k > 0 ? smaller(top_k, V) : V;
        double total = s.sum;
        if (limit < V) {
            std::nth_element(all.begin(), all.begin() + limit - 1, all.end());
            all.resize(limit);
            std::sort(all.begin(), all.end());
            total = fill(s, limit, std::numeric_limits<double>::infinity());
        }
        if (top_p >= 1.0) return;
        double goal = top_p * total;
        for (int64_t want = 256; limit == V; want *= 8) {  // sort a growing prefix until it holds enough
            want = smaller(want, V);
            std::nth_element(all.begin(), all.begin() + want - 1, all.end());
            std::sort(all.begin(), all.begin() + want);
            if (want == V || fill(s, want, goal) >= goal) break;
        }
        fill(s, limit, goal);
    }

    // Weights of the first `count` until their sum reaches the goal; sets `weights` and `sum`, returns the sum.
    double fill(const Statistics &s, int64_t count, double goal) {
        weights.clear();
        sum = 0.0;
        for (int64_t i = 0; i < count && sum < goal; i++) {
            float z = all[i].logit * s.inverse - s.maximum;
            alignas(64) float lanes[LANES];
            store(lanes, exp(splat(z)));
            weights.push_back(lanes[0]);
            sum += lanes[0];
        }
        return sum;
    }
};

struct Request {
    float temperature, top_p;
    int64_t top_k;
    uint64_t seed;
    int64_t position;
};

static inline int64_t sample_row(const float *row, int64_t V, const Request &request, float *logprob) {
    static thread_local std::vector<double> segment_sums;
    static thread_local Kept kept;
    segment_sums.resize(blocks_of(V, SEGMENT));
    Statistics s = statistics(row, V, request.temperature, segment_sums.data());
    int64_t token = 0;
    if (request.temperature == 0.0f) {
        for (int64_t i = 1; i < V; i++)
            if (row[i] > row[token]) token = i;
        *logprob = logprob_of(s, row[token]);
        return token;
    }
    double u = uniform(request.seed, request.position);
    if ((request.top_k <= 0 || request.top_k >= V) && request.top_p >= 1.0f) {
        token = invert(row, V, s, segment_sums.data(), u);
        *logprob = logprob_of(s, row[token]);
        return token;
    }
    kept.choose(row, V, s, request.top_k, request.top_p);
    double goal = u * kept.sum, before = 0.0;
    int64_t pick = 0, count = (int64_t)kept.weights.size();
    while (pick + 1 < count && before + kept.weights[pick] <= goal) before += kept.weights[pick++];
    token = kept.all[pick].id;
    *logprob = (float)((double)(row[token] * s.inverse - s.maximum) - std::log(kept.sum));
    return token;
}

}  // namespace sparring
