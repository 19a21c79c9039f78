// Steps of generation as one call: embedding, all layers over KV pages, head and sampler, for every new row of a step.
// If sequences are independent, further steps follow, each with the token that the step before has sampled.
//
// Every row goes through the same functions as in the separate operations, so its bits are the same. A row reads only
// keys and values of other rows. So a step is divided among threads in one of three ways:
//   apart    sequences are independent: a thread takes its rows through all layers without synchronisation;
//   rows     a row may read keys that another row of this step writes: threads synchronise once per layer, between
//            writing and reading;
//   columns  few rows, so that the weights dominate: a thread takes a share of the columns of every product.
#include <atomic>

#include "adapters.h"
#include "mixture.h"
#include "paged.h"
#include "parallel.h"
#include "sampling.h"

namespace sparring {
constexpr int64_t STOPS = 8;  // tokens that end a sequence, per slot; unused ones are negative
constexpr int64_t BIASES = 512;  // biased logits, per slot
constexpr int64_t TOPS = 20;  // most likely tokens to return

extern "C" {

// The model and, per slot, the settings of a running request. Twin of `DecoderPlan` in decoder_step.py.
struct LayerPlan {
    Weight qkv, o, gate_up, down;
    Weight router;  // [E][D]; where E is not 0, gate_up and down are those of the first of E experts
    const void *input_norm, *q_norm, *k_norm, *mlp_norm;  // q_norm, k_norm may be null
    void *keys, *values;                                  // pages of this layer
    float input_eps, q_eps, k_eps, mlp_eps;
    Form form;
    int64_t chosen, renormalised;  // experts per row; whether their softmax is over these alone
};

struct DecoderPlan {
    const LayerPlan *layers;
    Weight head;
    const void *embedding, *norm, *cos, *sin;  // cos, sin [max_positions][d]
    int64_t num_layers, D, H, G, d, V, max_positions;
    int64_t I, E, k;  // width of dense MLPs; most experts of a layer; most experts of a row
    int64_t page_size, num_pages, pages_per_table;
    const int32_t *tables;  // [slot][pages_per_table]
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const uint64_t *seeds;
    const int64_t *stops;  // [slot][STOPS]
    const int32_t
        *bias_ids;  // [slot][BIASES]: what is added to the logits of which tokens, all bias_counts[slot][1] of them
    const float *bias_values;  // until the sequence has bias_until[slot] tokens, the ones from bias_counts[slot][0] on
                               // after that
    const int32_t *bias_counts;
    const int64_t *bias_until;
    const uint8_t *limited;  // [slot]: whether only tokens with a bit in allowed[slot][ceil(V / 64)] may be sampled
    const uint64_t *allowed;
    const int32_t *tops;  // [slot]: number of most likely tokens to return, at most TOPS
    const int32_t *adapters;  // [slot]: which adapter, -1 for none
    float eps;
};

// Sequence b has its tables in slots[b], new rows cu_rows[b]:cu_rows[b + 1], and lengths[b] tokens including them; if
// samples[b] is set, its last row samples the next token. Results are in the order of the sequences that sample, with
// room for `steps` each, of which counts[i] are filled. With more than one step every sequence has one row and samples;
// all continue until one of them samples a stop token or another thread sets `interrupt`, and tokens and lengths are
// advanced.
struct StepPlan {
    const int32_t *slots, *cu_rows;
    int32_t *lengths;
    int64_t *tokens;
    const uint8_t *samples;
    int64_t B;
    int64_t independent;  // whether no sequence reads keys that another one writes in this call
    int64_t steps;        // 1 unless independent
    const int32_t *interrupt;
    int64_t *sampled;
    float *logprobs;
    int32_t *counts;
    int32_t
        *top_ids;  // [sequence that samples][steps][TOPS], with their log-probabilities; or null
    float *top_logprobs;
    uint64_t
        *kept;  // [sequence that samples][steps][ceil(V / 64)], zero at first: the kept ids of truncated draws; or null
    int64_t threads;
    const DeltaPlan
        *deltas;  // [adapter][num_layers][4], terms of qkv, o, gate_up and down; null without adapters
};
}

namespace {

constexpr int64_t ROWS_OF_A_THREAD = 16;  // with fewer, reading the weights dominates
constexpr int64_t BLOCK_ROWS = 192;  // for each of which all weights of a layer are read once more
constexpr int64_t KEPT_BYTES = 64 << 20;  // of weights that stay near a core from one step to the next
constexpr int64_t ROWS_TO_SHARE =
    4;  // fewer, and waiting for another thread takes longer than what is between two products
constexpr int64_t ROWS_OF_A_READING = 128;  // up to so many rows, reading weights from far takes longer than computing

// Division of a phase of a step: blocks of consecutive rows or, for few rows, columns of its products.
struct Division {
    int threads;
    int64_t block_rows;
    bool by_columns;

    // body(first, last) for all N rows.
    template <class Body> void rows(int64_t N, const Body &body) const {
        parallel_for(blocks_of(N, block_rows), by_columns ? 1 : threads,
                     [&](int64_t i) { body(i * block_rows, smaller(N, (i + 1) * block_rows)); });
    }

    // Between products: body(first, last) for the rows of this thread; threads without rows help.
    template <class Body> void share(int64_t first, int64_t last, const Body &body) const {
        int64_t parts = by_columns ? smaller(threads, (last - first) / ROWS_TO_SHARE) : 1;
        if (parts < 2) return body(first, last);
        parallel_for(parts, threads, [&](int64_t i) {
            body(first + (last - first) * i / parts, first + (last - first) * (i + 1) / parts);
        });
    }
};

// Intermediate results between the phases of a step, owned by the calling thread.
template <class T> struct Workspace {
    Buffer<T> x, h, qkv, o, gate_up, act, picked;
    Buffer<float> logits, routed, shares;
    Buffer<int32_t> sequence_of_row, sampling, chosen;
};

template <class T> struct Step {
    const DecoderPlan &m;
    const StepPlan &s;
    int64_t N, M, qkv_width, q_width;
    T *x, *h, *qkv, *o, *gate_up, *act, *picked;
    float *logits, *routed, *shares;  // [M][V], [N][E], [N][k]
    int32_t *sequence_of_row, *sampling, *chosen;  // [N]; [M] sequences that sample; [N][k]

    Step(const DecoderPlan &plan, const StepPlan &step, Workspace<T> &space) : m(plan), s(step) {
        N = s.cu_rows[s.B];
        q_width = m.H * m.d;
        qkv_width = q_width + 2 * m.G * m.d;
        sequence_of_row = space.sequence_of_row.room(N);
        sampling = space.sampling.room(s.B);
        M = 0;
        for (int32_t b = 0; b < s.B; b++) {
            for (int64_t n = s.cu_rows[b]; n < s.cu_rows[b + 1]; n++) sequence_of_row[n] = b;
            if (s.samples[b]) sampling[M++] = b;
        }
        x = space.x.room(N * m.D);
        h = space.h.room(N * m.D);
        qkv = space.qkv.room(N * qkv_width);
        o = space.o.room(N * q_width);
        gate_up = space.gate_up.room(N * 2 * m.I);
        act = space.act.room(N * m.I);
        picked = space.picked.room(M * m.D);
        logits = space.logits.room(M * m.V);
        routed = space.routed.room(N * m.E);
        shares = space.shares.room(N * m.k);
        chosen = space.chosen.room(N * m.k);
    }

    int32_t adapter(int64_t n) const { return m.adapters[s.slots[sequence_of_row[n]]]; }

    int64_t position(int64_t n) const {
        int32_t b = sequence_of_row[n];
        return s.lengths[b] - s.cu_rows[b + 1] + n;
    }

    Heads heads(const LayerPlan &layer) const {
        return {m.H, m.G, blocks_of(m.d, LANES) * LANES, m.d, qkv_width, layer.form};
    }

    Pages<T> pages(const LayerPlan &layer) const {
        return {(T *)layer.keys, (T *)layer.values, m.page_size, m.num_pages, m.tables,
                s.slots,         s.cu_rows,         s.lengths,   s.B,         m.pages_per_table};
    }

    // -1; or the first sequence whose table is wrong; or -2 - n for the first row n whose token or position is.
    int64_t first_bad() const {
        int64_t later = s.steps - 1, bad = pages(m.layers[0]).first_bad(later);
        if (bad >= 0) return bad;
        for (int64_t n = 0; n < N; n++)
            if (s.tokens[n] < 0 || s.tokens[n] >= m.V || position(n) + later >= m.max_positions) return -2 - n;
        return -1;
    }

    // out [rows][M] <- in [rows][K] W^T + bias for rows [first, last).
    template <class Y>
    void product(const Division &how, const Weight &w, const T *in, Y *out, int64_t first, int64_t last) const {
        linear_columns(w, in + first * w.K, out + first * w.M, last - first, how.by_columns ? how.threads : 1);
    }

    const DeltaPlan &delta(int32_t number, int64_t l, int which) const {
        return s.deltas[(number * m.num_layers + l) * 4 + which];
    }

    // Adds the terms of the rows' adapters to out [N][M], a product of in [N][K].
    void adapt(const Division &how, int64_t l, int which, int64_t M, const T *in, T *out, int64_t first,
               int64_t last) const {
        if (!s.deltas) return;
        adapt_rows(
            last - first, [&](int64_t i) { return adapter(first + i); },
            [&](int32_t number, int64_t i, int64_t rows) {
                const DeltaPlan &d = delta(number, l, which);
                add_delta(d, d.a, d.b, in + (first + i) * d.a.K, out + (first + i) * M, rows,
                          how.by_columns ? how.threads : 1);
            });
    }

    void norm_rows(const void *weight, float eps, int64_t first, int64_t last) const {
        for (int64_t n = first; n < last; n++) rms_norm_row(x + n * m.D, (const T *)weight, h + n * m.D, m.D, eps);
    }

    void add_rows(int64_t first, int64_t last) const {
        for (int64_t n = first; n < last; n++) add_row(x + n * m.D, h + n * m.D, m.D);
    }

    void embed(int64_t first, int64_t last) const {
        for (int64_t n = first; n < last; n++)
            memcpy(x + n * m.D, (const T *)m.embedding + s.tokens[n] * m.D, m.D * sizeof(T));
    }

    // Norms and rotates queries and keys in place, then writes keys and values into their pages.
    void place_row(const LayerPlan &layer, const Pages<T> &pages, const Heads &heads, int64_t n) const {
        T *row = qkv + n * qkv_width;
        const T *c = (const T *)m.cos + position(n) * m.d, *sin = (const T *)m.sin + position(n) * m.d;
        for (int64_t i = 0; i < m.H + m.G; i++) {
            T *head = row + i * m.d;
            if (layer.q_norm)
                rms_norm_row(head, (const T *)(i < m.H ? layer.q_norm : layer.k_norm), head, m.d,
                             i < m.H ? layer.q_eps : layer.k_eps);
            rotate(head, c, sin, head, m.d / 2, false);
        }
        pages.write(row + q_width, row + q_width + m.G * m.d, heads, sequence_of_row[n], position(n));
    }

    void attend(const Division &how, const Pages<T> &pages, const Heads &heads, int64_t first, int64_t last) const {
        if (how.by_columns)
            return parallel_for(last - first, how.threads,
                                [&](int64_t i) { attend(pages, heads, first + i, first + i + 1); });
        attend(pages, heads, first, last);
    }

    void attend(const Pages<T> &pages, const Heads &heads, int64_t first, int64_t last) const {
        for (int64_t n = first; n < last;) {
            int64_t b = sequence_of_row[n], begin = s.cu_rows[b], end = smaller(last, s.cu_rows[b + 1]);
            pages.attend(qkv + begin * qkv_width, o + begin * q_width, heads, b, n - begin, end - begin);
            n = end;
        }
    }

    // Up to the point where the keys and values of a layer are written.
    void begin_layer(const Division &how, int64_t l, int64_t first, int64_t last) const {
        const LayerPlan &layer = m.layers[l];
        how.share(first, last, [&](int64_t from, int64_t to) {
            if (l == 0) embed(from, to);
            norm_rows(layer.input_norm, layer.input_eps, from, to);
        });
        product(how, layer.qkv, h, qkv, first, last);
        adapt(how, l, 0, qkv_width, h, qkv, first, last);
        how.share(first, last, [&](int64_t from, int64_t to) {
            for (int64_t n = from; n < to; n++) place_row(layer, pages(layer), heads(layer), n);
        });
    }

    // From there to the end of the layer.
    void end_layer(const Division &how, int64_t l, int64_t first, int64_t last) const {
        const LayerPlan &layer = m.layers[l];
        attend(how, pages(layer), heads(layer), first, last);
        product(how, layer.o, o, h, first, last);
        adapt(how, l, 1, m.D, o, h, first, last);
        how.share(first, last, [&](int64_t from, int64_t to) {
            add_rows(from, to);
            norm_rows(layer.mlp_norm, layer.mlp_eps, from, to);
        });
        if (layer.router.M) mixture(how, l, first, last);
        else mlp(how, l, first, last);
        how.share(first, last, [&](int64_t from, int64_t to) { add_rows(from, to); });
    }

    void mlp(const Division &how, int64_t l, int64_t first, int64_t last) const {
        const LayerPlan &layer = m.layers[l];
        product(how, layer.gate_up, h, gate_up, first, last);
        adapt(how, l, 2, 2 * m.I, h, gate_up, first, last);
        how.share(first, last, [&](int64_t from, int64_t to) {
            for (int64_t n = from; n < to; n++) swiglu_row(gate_up + n * 2 * m.I, act + n * m.I, m.I);
        });
        product(how, layer.down, act, h, first, last);
        adapt(how, l, 3, m.D, act, h, first, last);
    }

    void mixture(const Division &how, int64_t l, int64_t first, int64_t last) const {
        const LayerPlan &layer = m.layers[l];
        int64_t E = layer.router.M, k = layer.chosen, count = last - first;
        int threads = how.by_columns ? how.threads : 1;
        // another thread may be in a layer with more experts
        float *logits_of = routed + first * m.E, *shares_of = shares + first * m.k;
        int32_t *chosen_of = chosen + first * m.k;
        T *rows = h + first * m.D;
        linear_columns(layer.router, rows, logits_of, count, threads);
        how.share(0, count, [&](int64_t from, int64_t to) {
            for (int64_t n = from; n < to; n++)
                route_row(logits_of + n * E, E, k, layer.renormalised, chosen_of + n * k, shares_of + n * k);
        });
        auto adapt_pairs = [&](int which, const Pairs::Piece &piece, const int32_t *row_of, const T *in, T *out,
                               int by) {
            if (!s.deltas) return;
            auto number_of = [&](int64_t i) { return adapter(first + row_of[piece.first + i]); };
            adapt_rows(piece.last - piece.first, number_of, [&](int32_t number, int64_t i, int64_t pairs) {
                const DeltaPlan &d = delta(number, l, 2 + which);
                add_delta(d, nth(d.a, piece.expert), nth(d.b, piece.expert), in + i * d.a.K, out + i * d.b.M, pairs,
                          by);
            });
        };
        mix_rows(Experts{layer.gate_up, layer.down, E}, rows, chosen_of, shares_of, rows, count, k, threads,
                 adapt_pairs);
    }

    // Final norm, head and sampler for the rows among [first, last) that sample, in the t-th step.
    void sample(const Division &how, int64_t t, int64_t first, int64_t last) const {
        int64_t from = 0, to;
        while (from < M && s.cu_rows[sampling[from] + 1] - 1 < first) from++;
        for (to = from; to < M && s.cu_rows[sampling[to] + 1] - 1 < last; to++)
            rms_norm_row(x + (s.cu_rows[sampling[to] + 1] - 1) * m.D, (const T *)m.norm, picked + to * m.D, m.D, m.eps);
        product(how, m.head, picked, logits, from, to);
        how.share(from, to, [&](int64_t one, int64_t end) { draw_rows(t, one, end); });
    }

    void draw_rows(int64_t t, int64_t from, int64_t to) const {
        for (int64_t i = from; i < to; i++) {
            int64_t b = sampling[i], slot = s.slots[b];
            Request request{m.temperature[slot], m.top_p[slot], m.min_p[slot],       m.top_k[slot],
                            m.seeds[slot],       s.lengths[b],  m.limited[slot] != 0};
            int64_t at = i * s.steps + t;
            Draw draw{s.logprobs + at, s.kept ? s.kept + at * blocks_of(m.V, 64) : nullptr};
            if (s.top_ids)
                draw.tops = m.tops[slot], draw.top_ids = s.top_ids + at * TOPS,
                draw.top_logprobs = s.top_logprobs + at * TOPS;
            bias(logits + i * m.V, slot, s.lengths[b]);
            s.sampled[at] = sample_row(logits + i * m.V, m.V, request, draw);
            s.counts[i] = (int32_t)t + 1;
        }
    }

    void bias(float *row, int64_t slot, int64_t length) const {
        const int32_t *ids = m.bias_ids + slot * BIASES, *counts = m.bias_counts + slot * 2;
        for (int64_t i = length < m.bias_until[slot] ? 0 : counts[0]; i < counts[1]; i++)
            row[ids[i]] += m.bias_values[slot * BIASES + i];
        const uint64_t *allowed = m.allowed + slot * blocks_of(m.V, 64);
        for (int64_t v = 0; v < m.V && m.limited[slot]; v++)
            if (!(allowed[v / 64] >> (v % 64) & 1)) row[v] = -std::numeric_limits<float>::infinity();
    }

    // Rows [first, last) from where the keys and values of layer l - 1 are written to where those of layer l are.
    void phase(const Division &how, int64_t t, int64_t l, int64_t first, int64_t last) const {
        if (l > 0) end_layer(how, l - 1, first, last);
        if (l < m.num_layers) begin_layer(how, l, first, last);
        else sample(how, t, first, last);
    }

    // All steps of rows [first, last), without synchronisation. `until` is the number of steps that all threads take.
    void rows_apart(const Division &how, int64_t first, int64_t last, std::atomic<int64_t> &until) const {
        for (int64_t t = 0; t < until.load(); t++) {
            for (int64_t l = 0; l <= m.num_layers; l++) phase(how, t, l, first, last);
            if (s.steps > 1 && go_on(t, first, last)) lower(until, t + 1);
        }
    }

    // Sequence n is row n here: its sampled token becomes its next row. Returns whether this was the last step.
    bool go_on(int64_t t, int64_t first, int64_t last) const {
        bool ends = __atomic_load_n(s.interrupt, __ATOMIC_RELAXED) != 0;
        for (int64_t n = first; n < last; n++) {
            int64_t token = s.sampled[n * s.steps + t];
            const int64_t *stops = m.stops + s.slots[n] * STOPS;
            for (int64_t i = 0; i < STOPS; i++) ends |= stops[i] == token;
            s.tokens[n] = token;
            s.lengths[n]++;
        }
        return ends;
    }

    static void lower(std::atomic<int64_t> &until, int64_t steps) {
        for (int64_t now = until.load(); steps < now && !until.compare_exchange_weak(now, steps);) {}
    }
};

static int64_t weight_bytes(const DecoderPlan &plan) {
    auto bytes = [](const Weight &w) { return blocks_of(w.M, PANEL) * panel_bytes(w); };
    int64_t sum = bytes(plan.head);
    for (int64_t l = 0; l < plan.num_layers; l++) {
        const LayerPlan &layer = plan.layers[l];
        sum +=
            bytes(layer.qkv) + bytes(layer.o) + larger(1, layer.router.M) * (bytes(layer.gate_up) + bytes(layer.down));
    }
    return sum;
}

template <class T> static int64_t decoder_step(const DecoderPlan &plan, const StepPlan &request) {
    static thread_local Workspace<T> space;
    Step<T> step(plan, request, space);
    int64_t bad = step.first_bad();
    if (bad != -1 || step.N == 0) return bad;
    int threads = (int)request.threads;
    // with rows to each of them, every thread reads all weights
    bool few = step.N < ROWS_OF_A_THREAD * threads || (step.N <= ROWS_OF_A_READING && weight_bytes(plan) > KEPT_BYTES);
    int64_t rows = few ? step.N : blocks_of(step.N, threads * blocks_of(step.N, threads * BLOCK_ROWS));
    Division how{threads, rows, few && threads > 1};
    std::atomic<int64_t> until{request.steps};
    if (request.independent)
        how.rows(step.N, [&](int64_t first, int64_t last) { step.rows_apart(how, first, last, until); });
    else
        for (int64_t l = 0; l <= plan.num_layers; l++)
            how.rows(step.N, [&](int64_t first, int64_t last) { step.phase(how, 0, l, first, last); });
    return -1;
}

}  // namespace

extern "C" {
int64_t sparring_decoder_step_f32(const DecoderPlan *plan, const StepPlan *step) {
    return decoder_step<float>(*plan, *step);
}
int64_t sparring_decoder_step_bf16(const DecoderPlan *plan, const StepPlan *step) {
    return decoder_step<bf16>(*plan, *step);
}
}
}  // namespace sparring
