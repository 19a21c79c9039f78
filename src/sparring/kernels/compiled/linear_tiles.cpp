// Products of many rows on AMX tiles, their gradients, and the packing of weights for them. See tiles.h for the
// arithmetic.
#include "linear.h"

namespace sparring {
namespace {

#ifdef SPARRING_AMX
// Of a weight gradient: parts of the rows, rows laid at once, and sums of a task, which stay in the second-level cache.
constexpr int64_t PARTS = 4, ROWS_AT_ONCE = 64, SUMS_PER_TASK = 125000;
constexpr int LINES_PER_CALL = 6;  // the 64 of a block of sums, over six calls for each 32 rows

// Rows of y in tasks of whole tiles, every task over all columns, unless the rows are few.
template <class X, class Y>
static void product(const Weight &w, const X *x, Y *y, int64_t N, int threads) {
    if (w.M * w.K < 200000 && N * w.M * w.K < 4000000) threads = 1;
    int64_t rows = ROWS_PER_TASK, panels = blocks_of(w.M, PANEL), columns = panels;
    while (rows > 2 * TILE && blocks_of(N, rows) < 4 * threads) rows = blocks_of(rows / 2, 2 * TILE) * 2 * TILE;
    if (blocks_of(N, rows) < threads) columns = blocks_of(panels, threads);
    int64_t groups = blocks_of(panels, columns);
    parallel_for(groups * blocks_of(N, rows), threads, [=](int64_t task) {
        int64_t row = task / groups * rows, first = task % groups * columns;
        Weight part = columns_of(w, first, smaller(panels, first + columns));
        linear_rows(part, x + row * w.K, y + row * w.M + first * PANEL, w.M, smaller(rows, N - row));
    });
}

// `split` of two vectors at once, a plane as 16 pairs: a value of `even` in the lower half of a pair, of `odd` in the
// upper.
static inline void split_pairs(v16 even, v16 odd, __m512i (&planes)[PLANES]) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    for (int plane = 0; plane < PLANES; plane++) {
        planes[plane] = _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        even = even - _mm512_castsi512_ps(_mm512_slli_epi32(planes[plane], 16));
        odd = odd - _mm512_castsi512_ps(_mm512_and_si512(planes[plane], upper));
    }
}

static inline v16 row_part(const float *x, int64_t width, int64_t rows, int64_t row, int64_t column) {
    return row < rows && column < width ? load_tail(x + row * width + column, width - column) : splat(0.0f);
}

// Two rows of x [rows][width], 32 columns, as one row of half a panel; its planes are as far apart as those of a
// weight.
static inline void pair_row(const float *x, int64_t width, int64_t rows, int64_t row, int64_t column, bf16 *out) {
    for (int64_t i = 0; i < DEPTH; i += LANES) {
        __m512i planes[PLANES];
        split_pairs(row_part(x, width, rows, row, column + i), row_part(x, width, rows, row + 1, column + i), planes);
        for (int plane = 0; plane < PLANES; plane++)
            _mm512_storeu_si512(out + plane * HALF_BLOCK + 2 * i, planes[plane]);
    }
}

// The product of two factors over their rows, [N][height] and [N][width]. Rows are cut into parts, whatever the
// threads; each part has sums of its own, and they are added in order. Sums [height][width] are kept as blocks
// [32][32], column by column.
struct Gradient {
    const float *down, *across;
    int64_t N, height, width;

    int64_t size() const { return padded(height) * padded(width); }
    int64_t block(int64_t m, int64_t k) const { return k / DEPTH * DEPTH * padded(height) + m / DEPTH * DEPTH * DEPTH; }
};

// Some rows of `down` on their way into tiles of their transpose, [tiles][blocks][planes][16][32]: ten calls for 32
// rows of 16 columns, each with few stores, for many at a time hold up the products that follow.
struct LayDown {
    const float *x;
    int64_t width, rows, blocks;
    bf16 *out;
    int64_t tile = 0, block = 0, step = 0;
    alignas(64) float turned[2][LANES][LANES] = {};  // even rows, odd rows

    bool left() const { return block < blocks; }

    // Turned while they are float32: the planes would be three times as much to turn.
    void turn(int64_t odd) {
        v16 vectors[LANES];
        for (int i = 0; i < LANES; i++) vectors[i] = row_part(x, width, rows, block * DEPTH + 2 * i + odd, tile * TILE);
        transpose(vectors);
        for (int i = 0; i < LANES; i++) store(turned[odd][i], vectors[i]);
    }

    void operator()() {
        if (step < 2) return turn(step++);
        bf16 *tiles = out + (tile * blocks + block) * PLANES * TILE_ELEMENTS;
        for (int64_t i = step - 2; i < step; i++) {
            __m512i planes[PLANES];
            split_pairs(load(turned[0][i]), load(turned[1][i]), planes);
            for (int plane = 0; plane < PLANES; plane++)
                _mm512_storeu_si512(tiles + plane * TILE_ELEMENTS + i * DEPTH, planes[plane]);
        }
        step += 2;
        if (step < 2 + TILE) return;
        step = 0;
        if (++tile == padded(width) / TILE) tile = 0, block++;
    }
};

// Some rows of 32 columns of `across` on their way into half a panel, [blocks][planes][16 pairs of rows][32][2]: one
// pair a call.
struct LayAcross {
    const float *x;
    int64_t width, rows, blocks, column;
    bf16 *out;
    int64_t pair = 0;

    bool left() const { return pair < blocks * TILE; }

    void operator()() {
        pair_row(x, width, rows, 2 * pair, column, out + pair / TILE * PLANES * HALF_BLOCK + pair % TILE * 2 * DEPTH);
        pair++;
    }
};

// The same of bfloat16, which have one plane.
static inline void pair_row(const bf16 *x, int64_t width, int64_t rows, int64_t row, int64_t column, bf16 *out) {
    alignas(64) bf16 lines[2][DEPTH] = {};
    for (int64_t i = 0; i < 2 && row + i < rows && column < width; i++)
        memcpy(lines[i], x + (row + i) * width + column, smaller(DEPTH, width - column) * sizeof(bf16));
    for (int64_t i = 0; i < DEPTH; i += LANES) {
        auto wide = [&](int line) {
            return _mm512_cvtepu16_epi32(_mm256_load_si256((const __m256i *)(lines[line] + i)));
        };
        _mm512_storeu_si512(out + 2 * i, _mm512_or_si512(wide(0), _mm512_slli_epi32(wide(1), 16)));
    }
}

template <class Lay> static void lay_all(Lay &lay) {
    while (lay.left()) lay();
}

// Work between the products of a block of sums: the cache lines of the next block are prefetched, then the next columns
// and the next rows are laid out.
struct BetweenProducts {
    LayAcross &across;
    LayDown &down;
    const float *line = nullptr;

    inline __attribute__((always_inline)) void operator()() {
        for (int i = 0; i < LINES_PER_CALL; i++, line += LANES) __builtin_prefetch(line, 1);
        if (across.left()) across();
        else if (down.left()) down();
    }
};

// Rows [first, end), times `columns` of `across` from `column` on. What has been laid of `across` is still in the
// first-level cache when it is read.
static void sum_part(const Gradient &g, int64_t first, int64_t end, int64_t column, int64_t columns, float *sums) {
    static thread_local Buffer<bf16> for_down, for_across;
    int64_t room = padded(g.height) * ROWS_AT_ONCE * PLANES, half = DEPTH * ROWS_AT_ONCE * PLANES, turn = 0;
    bf16 *a = for_down.room(2 * room), *b = for_across.room(2 * half);
    auto rows_at = [=](int64_t row) { return larger(0, smaller(ROWS_AT_ONCE, end - row)); };
    auto down_at = [=](int64_t row) {
        int64_t rows = rows_at(row), place = (row - first) / ROWS_AT_ONCE % 2;
        return LayDown{g.down + row * g.height, g.height, rows, blocks_of(rows, DEPTH), a + place * room};
    };
    auto across_at = [=, &turn](int64_t row, int64_t at) {
        int64_t rows = rows_at(row), place = turn++ % 2;
        return LayAcross{g.across + row * g.width, g.width, rows, blocks_of(rows, DEPTH), at, b + place * half};
    };
    LayDown down = down_at(first);
    LayAcross across = across_at(first, column);
    lay_all(down);
    lay_all(across);
    shape_tiles(TILE, TILE);
    for (int64_t row = first; row < end; row += ROWS_AT_ONCE) {
        int64_t blocks = down.blocks, step = blocks * PLANES * TILE_ELEMENTS;
        const bf16 *rows = down.out;
        down = down_at(row + ROWS_AT_ONCE);
        for (int64_t at = column; at < column + columns; at += DEPTH) {
            const bf16 *pairs = across.out;
            across = at + DEPTH < column + columns ? across_at(row, at + DEPTH) : across_at(row + ROWS_AT_ONCE, column);
            BetweenProducts between{across, down};
            float *out = sums + g.block(0, at);
            Operands o{rows, pairs, step};
            load_first<true>(o);
            for (int64_t m = 0; m < g.height; m += DEPTH, out += DEPTH * DEPTH) {
                Operands next{m + DEPTH < g.height ? o.a + 2 * step : rows, pairs, step};
                if (row == first) clear_sums<true>();
                else load_sums(out, DEPTH);
                between.line = out + DEPTH * DEPTH;
                multiply_split<true>(o, blocks, next, between);
                store_sums(out, DEPTH, true);
                o = next;
            }
            lay_all(across);
        }
        lay_all(down);
    }
    _tile_release();
}

// A block [16][16] of the sum of the parts.
static inline void add_parts(const float *sums, int64_t size, int64_t parts, v16 (&block)[LANES]) {
    for (int i = 0; i < LANES; i++) {
        block[i] = load(sums + i * DEPTH);
        for (int64_t part = 1; part < parts; part++) block[i] = block[i] + load(sums + i * DEPTH + part * size);
    }
}

// dw [M][K] = dy [N][M]^T x [N][K]. The narrower factor is the one to be transposed; where that is x, so is the
// product.
static void weight_gradient(const float *x, const float *dy, float *dw, int64_t N, int64_t M, int64_t K, int threads) {
    static thread_local Buffer<float> partial;
    bool turned = K < M;
    Gradient g = turned ? Gradient{x, dy, N, K, M} : Gradient{dy, x, N, M, K};
    int64_t parts = N >= PARTS * 2 * ROWS_AT_ONCE ? PARTS : 1, rows = padded(blocks_of(N, parts)), size = g.size();
    int64_t columns = padded(blocks_of(g.width, blocks_of(size, SUMS_PER_TASK))), groups = blocks_of(g.width, columns);
    float *sums = partial.room(parts * size);
    if (N * M * K < 4000000) threads = 1;
    parallel_for(parts * groups, threads, [=](int64_t task) {
        int64_t part = task / groups, column = task % groups * columns;
        int64_t here = smaller(columns, padded(g.width) - column);
        sum_part(g, part * rows, smaller(N, (part + 1) * rows), column, here, sums + part * size);
    });
    parallel_for(blocks_of(g.width, TILE), threads, [=](int64_t task) {
        for (int64_t k = task * TILE, m = 0; m < g.height; m += TILE) {
            v16 block[LANES];
            add_parts(sums + g.block(m, k) + m % DEPTH * DEPTH + k % DEPTH, size, parts, block);
            if (turned) transpose(block);
            int64_t row = turned ? k : m, column = turned ? m : k;
            for (int i = 0; i < smaller(LANES, M - row); i++)
                store_tail(dw + (row + i) * K + column, K - column, block[i]);
        }
    });
}
#else
template <class X, class Y> static void product(const Weight &, const X *, Y *, int64_t, int) {}
#endif

}  // namespace

extern "C" {

// 1 when this build and this process may use AMX tiles; the other functions of this file do nothing otherwise.
int64_t sparring_has_tiles() { return permitted(); }

// weight [M, K] row-major -> panels; columns past M and k past K hold zeros.
void sparring_pack_bf16(const bf16 *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    pack_pairs(weight, panels, M, K, padded(K) / 2, 2 * TILE, threads);
}

// x [N, K] -> y [N, M], float32 when `wide`, else bfloat16.
void sparring_linear_bf16(const bf16 *x, const bf16 *panels, const float *bias, void *y, int wide, int64_t N, int64_t M,
                          int64_t K, int threads) {
    Weight w{panels, TILES_BF16, M, K, bias};
    if (wide) product(w, x, (float *)y, N, threads);
    else product(w, x, (bf16 *)y, N, threads);
}

#ifdef SPARRING_AMX
// weight [M, K] float32 -> panels of three planes.
void sparring_pack_split(const float *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(K, DEPTH);
    parallel_for(blocks_of(M, PANEL), threads, [=](int64_t panel) {
        for (int64_t block = 0; block < 2 * blocks; block++)
            for (int64_t m = 0; m < PANEL; m += LANES) {
                v16 turned[LANES];
                for (int i = 0; i < LANES; i++)
                    turned[i] = row_part(weight, K, M, panel * PANEL + m + i, block * LANES);
                transpose(turned);
                bf16 *out = panels + panel * blocks * PLANES * PANEL_BLOCK + place_in_panel(m, blocks * PLANES) +
                            block / 2 * PLANES * HALF_BLOCK + block % 2 * HALF_BLOCK / 2;
                for (int i = 0; i < LANES; i += 2, out += 2 * DEPTH) {
                    __m512i planes[PLANES];
                    split_pairs(turned[i], turned[i + 1], planes);
                    for (int plane = 0; plane < PLANES; plane++)
                        _mm512_storeu_si512(out + plane * HALF_BLOCK, planes[plane]);
                }
            }
    });
}

// weight [M, K] float32 -> panels of its transpose [K, M], for the gradient of x.
void sparring_pack_split_transposed(const float *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(M, DEPTH);
    parallel_for(blocks_of(K, PANEL), threads, [=](int64_t panel) {
        for (int64_t k = panel * PANEL; k < (panel + 1) * PANEL; k += DEPTH)
            for (int64_t m = 0; m < blocks * DEPTH; m += 2)
                pair_row(weight, K, M, m, k,
                         panels + (k / DEPTH * blocks + m / DEPTH) * PLANES * HALF_BLOCK + m % DEPTH * DEPTH);
    });
}

// weight [M, K] -> panels of its transpose [K, M], for the gradient of x; of x [N, K], for that of the weight.
void sparring_pack_bf16_transposed(const bf16 *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(M, DEPTH);
    parallel_for(blocks_of(K, PANEL), threads, [=](int64_t panel) {
        for (int64_t k = panel * PANEL; k < (panel + 1) * PANEL; k += DEPTH)
            for (int64_t m = 0; m < blocks * DEPTH; m += 2)
                pair_row(weight, K, M, m, k,
                         panels + (k / DEPTH * blocks + m / DEPTH) * HALF_BLOCK + m % DEPTH * DEPTH);
    });
}

// x [N, M] -> its transpose [M, N].
void sparring_transpose_bf16(const bf16 *x, bf16 *out, int64_t N, int64_t M, int threads) {
    parallel_for(blocks_of(M, LANES), threads, [=](int64_t task) {
        int64_t column = task * LANES, columns = smaller(LANES, M - column);
        for (int64_t n = 0; n < N; n += LANES) {
            v16 turned[LANES];
            for (int64_t i = 0; i < LANES; i++)
                turned[i] = n + i < N ? load_tail(x + (n + i) * M + column, columns) : splat(0.0f);
            transpose(turned);
            for (int64_t i = 0; i < columns; i++) store_tail(out + (column + i) * N + n, N - n, turned[i]);
        }
    });
}

// x [N, K] -> y [N, M], both float32.
void sparring_linear_split(const float *x, const bf16 *panels, const float *bias, float *y, int64_t N, int64_t M,
                           int64_t K, int threads) {
    product(Weight{panels, TILES_F32, M, K, bias}, x, y, N, threads);
}

// dw [M, K] <- dy [N, M]^T x [N, K]; N above 0.
void sparring_weight_gradient_split(const float *x, const float *dy, float *dw, int64_t N, int64_t M, int64_t K,
                                    int threads) {
    weight_gradient(x, dy, dw, N, M, K, threads);
}
#else
void sparring_pack_split(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_pack_split_transposed(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_pack_bf16_transposed(const bf16 *, bf16 *, int64_t, int64_t, int) {}
void sparring_transpose_bf16(const bf16 *, bf16 *, int64_t, int64_t, int) {}
void sparring_linear_split(const float *, const bf16 *, const float *, float *, int64_t, int64_t, int64_t, int) {}
void sparring_weight_gradient_split(const float *, const float *, float *, int64_t, int64_t, int64_t, int) {}
#endif

}  // extern "C"
}  // namespace sparring
