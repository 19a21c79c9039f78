// Products of many rows on AMX tiles, their gradients, and the packing of weights for them. See tiles.h for the arithmetic.
#include "linear.h"
#include "parallel.h"

namespace sparring {
namespace {

#ifdef SPARRING_AMX
constexpr int64_t PARTS = 4, ROWS_PER_BLOCK = 128, PANELS_PER_TASK = 8;  // of a weight gradient

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

// `split` of two vectors at once, a plane as 16 pairs: a value of `even` in the lower half of a pair, of `odd` in the upper.
static inline void split_pairs(v16 even, v16 odd, __m512i (&planes)[PLANES]) {
    const __m512i interleave = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                                20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
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

// One block of 32 rows of x [rows][width], 64 columns, into its place among the blocks of a panel: [2][blocks][planes][16 pairs
// of rows][32][2].
static void pair_rows(const float *x, int64_t width, int64_t rows, int64_t block, int64_t panel, bf16 *out, int64_t blocks) {
    for (int64_t pair = 0; pair < TILE; pair++)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            int64_t row = block * DEPTH + 2 * pair, column = panel * PANEL + i;
            __m512i planes[PLANES];
            split_pairs(row_part(x, width, rows, row, column), row_part(x, width, rows, row + 1, column), planes);
            bf16 *here = out + place_in_panel(i, blocks * PLANES) + block * PLANES * HALF_BLOCK + pair * 2 * DEPTH;
            for (int plane = 0; plane < PLANES; plane++) _mm512_storeu_si512(here + plane * HALF_BLOCK, planes[plane]);
        }
}

// [16][16] units of 32 bits, rows `stride` elements of bf16 apart -> transposed, rows 32 elements apart.
static void transpose_units(const bf16 *in, int64_t stride, bf16 *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0x88);
            b[i + 4 + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_si512(out + j * DEPTH, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
        _mm512_storeu_si512(out + (8 + j) * DEPTH, _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
    }
}

// A weight gradient dw [M][K] = dy [N][M]^T x [N][K]. Rows are cut into parts, whatever the threads, and each part adds its
// blocks of rows to sums of its own, [M padded to 32][K padded to 32]; the parts are added in order.
struct Gradient {
    const float *x, *dy;
    int64_t N, M, K;
};

// What one task does: some columns of dy, all of x.
struct GradientPart {
    const Gradient &g;
    int64_t panel, panels, width;  // panels of columns of dy; K padded
    bf16 *a, *b;                   // dy as tiles of its transpose [panels * 4][blocks][planes][16][32]; x in pairs
    float *sums;

    // Block by block: the pieces of a row that follow each other in memory are read one after the other.
    void lay(int64_t first, int64_t rows, int64_t blocks) const {
        alignas(64) bf16 pairs[PLANES * PANEL_BLOCK];
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t p = 0; p < panels; p++) {
                pair_rows(g.dy + (first + block * DEPTH) * g.M, g.M, rows - block * DEPTH, 0, panel + p, pairs, 1);
                for (int64_t tile = 0; tile < PANEL / TILE; tile++)
                    for (int64_t plane = 0; plane < PLANES; plane++)
                        transpose_units(pairs + place_in_panel(tile * TILE, PLANES) + plane * HALF_BLOCK, 2 * DEPTH,
                                        a + (((p * (PANEL / TILE) + tile) * blocks + block) * PLANES + plane) * TILE_ELEMENTS);
            }
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t p = 0; p < blocks_of(g.K, PANEL); p++)
                pair_rows(g.x + first * g.K, g.K, rows, block, p, b + p * blocks * PLANES * PANEL_BLOCK, blocks);
    }

    void add(int64_t blocks, bool fresh) const {
        int64_t step = PLANES * TILE_ELEMENTS, height = smaller(panels * PANEL, padded(g.M) - panel * PANEL);
        shape_tiles(TILE, TILE);
        for (int64_t m = 0; m < height; m += 2 * TILE)
            for (int64_t k = 0; k < width; k += 2 * TILE) {
                float *out = sums + (panel * PANEL + m) * width + k;
                if (fresh) clear_sums<true>();
                else load_sums(out, width);
                Operands o{a + m / TILE * blocks * step, b + k / (2 * TILE) * blocks * PLANES * HALF_BLOCK, blocks * step};
                multiply_split<true>(o, blocks);
                store_sums(out, width, true);
            }
        _tile_release();
    }
};

static void weight_gradient(const Gradient &g, float *dw, int threads) {
    static thread_local Buffer<float> partial;
    int64_t parts = g.N >= PARTS * ROWS_PER_BLOCK ? PARTS : 1, rows = blocks_of(blocks_of(g.N, parts), DEPTH) * DEPTH;
    int64_t panels = blocks_of(g.M, PANEL), groups = blocks_of(panels, PANELS_PER_TASK), size = padded(g.M) * padded(g.K);
    float *sums = partial.room(parts * size);
    if (g.N * g.M * g.K < 4000000) threads = 1;
    parallel_for(parts * groups, threads, [=](int64_t task) {
        static thread_local Buffer<bf16> rows_of_y, rows_of_x;
        int64_t part = task / groups, panel = task % groups * PANELS_PER_TASK, mine = smaller(PANELS_PER_TASK, panels - panel);
        GradientPart me{g, panel, mine, padded(g.K), rows_of_y.room(mine * PANEL * ROWS_PER_BLOCK * PLANES),
                        rows_of_x.room(blocks_of(g.K, PANEL) * PANEL * ROWS_PER_BLOCK * PLANES), sums + part * size};
        for (int64_t row = part * rows; row < smaller(g.N, (part + 1) * rows); row += ROWS_PER_BLOCK) {
            int64_t count = smaller(smaller(ROWS_PER_BLOCK, g.N - row), (part + 1) * rows - row), blocks = blocks_of(count, DEPTH);
            me.lay(row, count, blocks);
            me.add(blocks, row == part * rows);
        }
    });
    for (int64_t m = 0; m < g.M; m++)
        for (int64_t k = 0; k < g.K; k += LANES) {
            const float *in = sums + m * padded(g.K) + k;
            v16 sum = load(in);
            for (int64_t part = 1; part < parts; part++) sum = sum + load(in + part * size);
            store_tail(dw + m * g.K + k, g.K - k, sum);
        }
}
#else
template <class X, class Y> static void product(const Weight &, const X *, Y *, int64_t, int) {}
#endif

}  // namespace

extern "C" {

// 1 when this build and this process may use AMX tiles; the other functions of this file do nothing otherwise.
int64_t sparring_has_tiles() { return permitted(); }

// weight [M, K] row-major -> panels; columns past M and k past K hold zeros.
void sparring_pack_bf16(const uint16_t *weight, uint16_t *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(K, DEPTH);
    parallel_for(blocks_of(M, PANEL), threads, [=](int64_t panel) {
        uint16_t *out = panels + panel * blocks * PANEL_BLOCK;
        for (int64_t m = 0; m < PANEL; m++) {
            int64_t row = panel * PANEL + m;
            uint16_t *column = out + place_in_panel(m, blocks);
            for (int64_t k = 0; k < blocks * DEPTH; k++)
                column[k / 2 * 2 * DEPTH + k % 2] = row < M && k < K ? weight[row * K + k] : 0;
        }
    });
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
        alignas(64) bf16 rows[TILE * DEPTH * PLANES];
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t m = 0; m < PANEL; m += TILE) {
                bf16 *out = panels + panel * blocks * PLANES * PANEL_BLOCK + place_in_panel(m, blocks * PLANES) +
                            block * PLANES * HALF_BLOCK;
                memset(rows, 0, sizeof(rows));
                int64_t row = panel * PANEL + m, k = block * DEPTH;
                for (int64_t r = 0; r < smaller(TILE, M - row); r++)
                    for (int64_t half = 0; half < DEPTH && k + half < K; half += LANES) {
                        Halves parts = split(load_tail(weight + (row + r) * K + k + half, K - k - half));
                        for (int plane = 0; plane < PLANES; plane++)
                            _mm256_storeu_si256((__m256i *)(rows + (plane * TILE + r) * DEPTH + half), parts.part[plane]);
                    }
                for (int plane = 0; plane < PLANES; plane++) {
                    alignas(64) bf16 turned[TILE * DEPTH];
                    transpose_units(rows + plane * TILE_ELEMENTS, DEPTH, turned);
                    for (int64_t pair = 0; pair < TILE; pair++)
                        memcpy(out + plane * HALF_BLOCK + pair * 2 * DEPTH, turned + pair * DEPTH, DEPTH * sizeof(bf16));
                }
            }
    });
}

// weight [M, K] float32 -> panels of its transpose [K, M], for the gradient of x.
void sparring_pack_split_transposed(const float *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(M, DEPTH);
    parallel_for(blocks_of(K, PANEL), threads, [=](int64_t panel) {
        for (int64_t block = 0; block < blocks; block++)
            pair_rows(weight, K, M, block, panel, panels + panel * blocks * PLANES * PANEL_BLOCK, blocks);
    });
}

// x [N, K] -> y [N, M], both float32.
void sparring_linear_split(const float *x, const bf16 *panels, const float *bias, float *y, int64_t N, int64_t M, int64_t K,
                           int threads) {
    product(Weight{panels, TILES_F32, M, K, bias}, x, y, N, threads);
}

// dw [M, K] <- dy [N, M]^T x [N, K]; N above 0.
void sparring_weight_gradient_split(const float *x, const float *dy, float *dw, int64_t N, int64_t M, int64_t K, int threads) {
    weight_gradient(Gradient{x, dy, N, M, K}, dw, threads);
}
#else
void sparring_pack_split(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_pack_split_transposed(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_linear_split(const float *, const bf16 *, const float *, float *, int64_t, int64_t, int64_t, int) {}
void sparring_weight_gradient_split(const float *, const float *, float *, int64_t, int64_t, int64_t, int) {}
#endif

}  // extern "C"
}  // namespace sparring
