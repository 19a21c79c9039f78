// Mixtures of experts: routing and outputs of a row, from that row alone.
#pragma once

#include "linear.h"
#include "rows.h"

namespace sparring {

constexpr int64_t PAIRS_OF_A_THREAD = 16;  // to be added up; waking another one for fewer costs more

extern "C" {
// Contiguously packed gated MLPs: gate_up and down are those of the first.
struct Experts {
    Weight gate_up, down;
    int64_t E;
};
}

// The k most likely of E experts, most likely first and ties by number, and their shares: of the softmax over all
// experts or, if `renormalised`, over the k.
static inline void route_row(const float *logits, int64_t E, int64_t k, bool renormalised, int32_t *chosen,
                             float *shares) {
    for (int64_t e = 0, filled = 0; e < E; e++) {
        if (filled == k && !(logits[e] > logits[chosen[k - 1]])) continue;
        int64_t at = filled < k ? filled++ : k - 1;
        for (; at > 0 && logits[e] > logits[chosen[at - 1]]; at--) chosen[at] = chosen[at - 1];
        chosen[at] = (int32_t)e;
    }
    for (int64_t j = 0; j < k; j++) shares[j] = logits[chosen[j]];
    v16 top = splat(shares[0]), sums = splat(0.0f);
    const float *terms = renormalised ? shares : logits;
    for (int64_t i = 0, count = renormalised ? k : E; i < count; i += LANES)
        sums = sums + exp(load_tail(terms + i, count - i, -std::numeric_limits<float>::infinity()) - top);
    v16 sum = splat(lane_sum(sums));
    for (int64_t j = 0; j < k; j += LANES) store_tail(shares + j, k - j, exp(load_tail(shares + j, k - j) - top) / sum);
}

// Pairs of a row and an expert, sorted by expert and cut into pieces with one expert each.
struct Pairs {
    struct Piece {
        int64_t expert, first, last;
    };
    std::vector<Piece> pieces;
    Buffer<int32_t> rows, places,
        ends;  // row of each place; place of each pair; end of each expert's places

    void sort(const int32_t *chosen, int64_t N, int64_t k, int64_t E) {
        int32_t *end = ends.room(E), *row = rows.room(N * k), *place = places.room(N * k);
        memset(end, 0, E * sizeof(int32_t));
        for (int64_t i = 0; i < N * k; i++) end[chosen[i]]++;
        pieces.clear();
        for (int64_t e = 0, first = 0; e < E; e++) {
            int64_t last = first + end[e];
            end[e] = (int32_t)first;
            for (; first < last; first += ROWS_PER_TASK)
                pieces.push_back({e, first, smaller(first + ROWS_PER_TASK, last)});
            first = last;
        }
        for (int64_t i = 0; i < N * k; i++) {
            place[i] = end[chosen[i]]++;
            row[place[i]] = (int32_t)(i / k);
        }
    }
};

// Intermediate results of the experts' products, by place.
template <class T> struct MixtureSpace {
    Pairs pairs;
    Buffer<T> in, gate_up, act, out;
};

// y [N][D] <- outputs of the k experts chosen [N][k] of each row of x [N][D], weighted by shares [N][k] and added in
// float32 in the order of `chosen`. y may be x. adapt(which, piece, rows, in, out, threads) may add to the first (0)
// and second (1) product of the pairs of a piece; rows [place] are indices into x.
template <class T, class Adapt>
static void mix_rows(const Experts &w, const T *x, const int32_t *chosen, const float *shares, T *y, int64_t N,
                     int64_t k, int threads, const Adapt &adapt) {
    static thread_local MixtureSpace<T> space;
    int64_t D = w.gate_up.K, I = w.down.K;
    space.pairs.sort(chosen, N, k, w.E);
    const std::vector<Pairs::Piece> &pieces = space.pairs.pieces;
    const int32_t *rows = space.pairs.rows.room(0), *places = space.pairs.places.room(0);
    T *in = space.in.room(N * k * D), *gate_up = space.gate_up.room(N * k * 2 * I), *act = space.act.room(N * k * I);
    T *out = space.out.room(N * k * D);
    auto compute = [&](const Pairs::Piece &piece, int by) {
        int64_t first = piece.first, count = piece.last - first;
        for (int64_t p = first; p < piece.last; p++) memcpy(in + p * D, x + rows[p] * D, D * sizeof(T));
        linear_columns(nth(w.gate_up, piece.expert), in + first * D, gate_up + first * 2 * I, count, by);
        adapt(0, piece, rows, in + first * D, gate_up + first * 2 * I, by);
        for (int64_t p = first; p < piece.last; p++) swiglu_row(gate_up + p * 2 * I, act + p * I, I);
        linear_columns(nth(w.down, piece.expert), act + first * I, out + first * D, count, by);
        adapt(1, piece, rows, act + first * I, out + first * D, by);
    };
    if ((int64_t)pieces.size() < threads)
        for (const Pairs::Piece &piece : pieces) compute(piece, threads);
    else parallel_for(pieces.size(), threads, [&](int64_t i) { compute(pieces[i], 1); });
    parallel_ranges(N, blocks_of(PAIRS_OF_A_THREAD, k), threads, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; n++)
            for (int64_t i = 0; i < D; i += LANES) {
                auto term = [&](int64_t j) {
                    return load_tail(out + places[n * k + j] * D + i, D - i) * splat(shares[n * k + j]);
                };
                v16 total = term(0);
                for (int64_t j = 1; j < k; j++) total = total + term(j);
                store_tail(y + n * D + i, D - i, total);
            }
    });
}

}  // namespace sparring
