// Log-probabilities, entropies and samples of a row of float32 logits. One function, `statistics`, gives the maximum
// and the normaliser of a row to all of them, so that a sampled token's log-probability and its recomputation agree to
// the bit.
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

struct Request {
    float temperature, top_p, min_p;
    int64_t top_k;
    uint64_t seed;
    int64_t position;
    bool limited;  // forbidden tokens have logits of minus infinity; the allowed ones are recorded as a kept set
    bool truncates(int64_t V) const {
        return temperature != 0.0f && (limited || (top_k > 0 && top_k < V) || top_p < 1.0f || min_p > 0.0f);
    }
};

struct Candidate {
    float logit, weight;
    int32_t id;
    bool operator<(const Candidate &other) const { return logit != other.logit ? logit > other.logit : id < other.id; }
};

// Kept set of a draw: the logits of the kept ids, compacted, ids ascending. It is treated as a row of its own for
// statistics, draws and gradients, so the kept ids suffice to recompute the bits of the draw.
struct Kept {
    std::vector<int32_t> ids;
    std::vector<float> logits;

    void gather(const float *row, const int32_t *wanted, int64_t count) {
        logits.resize(count);
        for (int64_t i = 0; i < count; i++) logits[i] = row[wanted[i]];
    }
};

// Top-k, then the shortest prefix that holds top_p of what top-k left (Holtzman et al. 2020), both best first (equal
// logits: lowest id first), and of these the tokens with at least min_p of the likeliest one's probability (Nguyen et
// al. 2024). The likeliest is always kept, a token of weight zero never.
struct Truncation {
    std::vector<Candidate> best;

    void choose(const float *row, int64_t V, const Statistics &s, const Request &request, Kept &kept) {
        int64_t limit = request.top_k > 0 ? smaller(request.top_k, V) : V;
        double total = s.sum;
        // without top-k, min-p and top-p use the same total, so top-p need not look at tokens that min-p excludes
        collect(row, V, s, limit, limit < V ? 0.0f : request.min_p);
        if (request.top_p < 1.0f) {
            if (limit < V) {
                std::sort(best.begin(), best.end());
                total = sum(0, (int64_t)best.size());
            }
            best.resize(prefix((double)request.top_p * total));
        }
        kept.ids.clear();
        for (const Candidate &candidate : best)
            if (candidate.weight >= request.min_p) kept.ids.push_back(candidate.id);
        if (kept.ids.empty()) kept.ids.push_back(0);  // a row of NaN
        std::sort(kept.ids.begin(), kept.ids.end());
        kept.gather(row, kept.ids.data(), (int64_t)kept.ids.size());
    }

  private:
    // The `limit` best of those with a weight that is above zero and at least `lowest`, in any order.
    void collect(const float *row, int64_t V, const Statistics &s, int64_t limit, float lowest) {
        float worst = -std::numeric_limits<float>::infinity();  // of the best `limit` so far: equals that come later
                                                                // are none of them
        best.clear();
        for (int64_t i = 0; i < V; i += LANES) {
            if (limit < V && !(lane_max(load_tail(row + i, V - i, worst)) > worst)) continue;
            v16 shifted, weight = weight_at(row, i, V, splat(s.inverse), splat(s.maximum), &shifted);
            if (lane_max(weight) < lowest) continue;
            alignas(64) float weights[LANES];
            store(weights, weight);
            for (int64_t l = 0; l < smaller(LANES, V - i); l++)
                if (row[i + l] > worst && weights[l] > 0.0f && weights[l] >= lowest)
                    best.push_back({row[i + l], weights[l], (int32_t)(i + l)});
            if ((int64_t)best.size() >= 2 * limit + 64) worst = cut(limit);
        }
        if ((int64_t)best.size() > limit) cut(limit);
    }

    // Leaves the best `count`, at least one; the logit of the last of them.
    float cut(int64_t count) {
        std::nth_element(best.begin(), best.begin() + count - 1, best.end());
        best.resize(count);
        return best[count - 1].logit;
    }

    double sum(int64_t begin, int64_t end) const {
        double total = 0.0;
        for (int64_t i = begin; i < end; i++) total += best[i].weight;
        return total;
    }

    // How many of the best it takes to reach the goal; they come first then. Halves what is in question again and
    // again.
    int64_t prefix(double goal) {
        int64_t begin = 0, end = (int64_t)best.size();
        double before = 0.0;
        while (end - begin > 64) {
            int64_t middle = (begin + end) / 2;
            std::nth_element(best.begin() + begin, best.begin() + middle, best.begin() + end);
            double half = sum(begin, middle);
            if (before + half >= goal) {
                end = middle;
            } else {
                before += half;
                begin = middle;
            }
        }
        std::sort(best.begin() + begin, best.begin() + end);
        for (int64_t i = begin; i < end; i++)
            if ((before += best[i].weight) >= goal) return i + 1;
        return end;
    }
};

// What a draw leaves: its log-probability; a bit for each kept id of a truncated one, in a mask [ceil(V / 64)] that is
// zero at first; the `tops` likeliest ids, best first, with their log-probabilities. All but the first may be null.
struct Draw {
    float *logprob;
    uint64_t *mask = nullptr;
    int64_t tops = 0;
    int32_t *top_ids = nullptr;
    float *top_logprobs = nullptr;

    // Of the row that was drawn from, whose ids are `ids`, or its places where that is null. Where it is shorter than
    // `tops` the rest stays as it is.
    void likeliest(const float *row, int64_t V, const Statistics &s, const int32_t *ids) const {
        int64_t known = 0;
        for (int64_t i = 0; i < V && tops; i++) {
            int64_t at = known;
            while (at > 0 && row[i] > row[top_ids[at - 1]]) at--;
            if (at == tops) continue;
            known = smaller(known + 1, tops);
            for (int64_t j = known - 1; j > at; j--) top_ids[j] = top_ids[j - 1];
            top_ids[at] = (int32_t)i;
        }
        for (int64_t j = 0; j < known; j++) {
            top_logprobs[j] = logprob_of(s, row[top_ids[j]]);
            if (ids) top_ids[j] = ids[top_ids[j]];
        }
    }
};

static inline int64_t sample_row(const float *row, int64_t V, const Request &request, const Draw &draw) {
    static thread_local std::vector<double> segment_sums;
    static thread_local Truncation truncation;
    static thread_local Kept kept;
    segment_sums.resize(blocks_of(V, SEGMENT));
    Statistics s = statistics(row, V, request.temperature, segment_sums.data());
    int64_t token = 0;
    if (request.temperature == 0.0f) {
        for (int64_t i = 1; i < V; i++)
            if (row[i] > row[token]) token = i;
        *draw.logprob = logprob_of(s, row[token]);
        draw.likeliest(row, V, s, nullptr);
        return token;
    }
    double u = uniform(request.seed, request.position);
    if (!request.truncates(V)) {
        token = invert(row, V, s, segment_sums.data(), u);
        *draw.logprob = logprob_of(s, row[token]);
        draw.likeliest(row, V, s, nullptr);
        return token;
    }
    truncation.choose(row, V, s, request, kept);
    int64_t count = (int64_t)kept.ids.size();
    s = statistics(kept.logits.data(), count, request.temperature, segment_sums.data());
    int64_t place = invert(kept.logits.data(), count, s, segment_sums.data(), u);
    *draw.logprob = logprob_of(s, kept.logits[place]);
    draw.likeliest(kept.logits.data(), count, s, kept.ids.data());
    if (draw.mask)
        for (int32_t id : kept.ids) draw.mask[id / 64] |= 1ull << (id % 64);
    return kept.ids[place];
}

}  // namespace sparring
