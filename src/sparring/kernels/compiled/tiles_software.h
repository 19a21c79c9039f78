// AMX tiles in software, for processors that have none: the same products, slowly, for tests and for replaying what a
// machine with tiles has sampled. The arithmetic is that of Intel's manual (TDPBF16PS): for each element of a sum, the
// even and the odd products of pairs are two chains of fused multiply-adds from zero, which are added to each other and
// then to the sum; subnormal numbers count as zero.
#pragma once

#include "simd.h"

#undef _tile_loadconfig
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_release
#define _tile_loadconfig(shape) ::sparring::software::shape_all(shape)
#define _tile_loadd(tile, base, stride) ::sparring::software::load(tile, base, stride)
#define _tile_stored(tile, base, stride) ::sparring::software::save(tile, base, stride)
#define _tile_zero(tile) ::sparring::software::clear(tile)
#define _tile_dpbf16ps(sums, rows, columns) ::sparring::software::multiply(sums, rows, columns)
#define _tile_release() ((void)0)

namespace sparring::software {

constexpr int TILES = 8, ROWS = 16;

struct alignas(64) Tile {
    uint8_t row[ROWS][64];
};

// Of a thread: how many rows the tiles have and how many bytes each of a row, and what they hold.
struct State {
    uint8_t rows[ROWS];
    uint16_t row_bytes[ROWS];
    Tile tiles[TILES];

    static State &mine() {
        static thread_local State state;
        return state;
    }
};

// As the processor reads it: bytes of a row from byte 16 on, rows from byte 48 on.
static inline void shape_all(const void *shape) {
    State &state = State::mine();
    memcpy(state.row_bytes, (const uint8_t *)shape + 16, sizeof state.row_bytes);
    memcpy(state.rows, (const uint8_t *)shape + 48, sizeof state.rows);
    memset(state.tiles, 0, sizeof state.tiles);
}

static inline void clear(int tile) { memset(&State::mine().tiles[tile], 0, sizeof(Tile)); }

static inline void load(int tile, const void *base, int64_t stride) {
    State &state = State::mine();
    clear(tile);
    for (int r = 0; r < state.rows[tile]; r++)
        memcpy(state.tiles[tile].row[r], (const uint8_t *)base + r * stride, state.row_bytes[tile]);
}

static inline void save(int tile, void *base, int64_t stride) {
    State &state = State::mine();
    for (int r = 0; r < state.rows[tile]; r++)
        memcpy((uint8_t *)base + r * stride, state.tiles[tile].row[r], state.row_bytes[tile]);
}

static inline void multiply(int sums, int rows, int columns) {
    constexpr unsigned FLUSH = 0x8040;  // subnormal operands and results are zero
    State &state = State::mine();
    const unsigned before = _mm_getcsr();
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000);
    _mm_setcsr(before | FLUSH);
    for (int m = 0; m < state.rows[sums]; m++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < state.row_bytes[rows] / 4; k++) {
            __m512i b = _mm512_load_si512(state.tiles[columns].row[k]);
            __m512i a = _mm512_set1_epi32(((const int32_t *)state.tiles[rows].row[m])[k]);
            even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(a, 16), (__m512)_mm512_slli_epi32(b, 16), even);
            odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(a, upper), (__m512)_mm512_and_si512(b, upper), odd);
        }
        float *sum = (float *)state.tiles[sums].row[m];
        _mm512_store_ps(sum, _mm512_load_ps(sum) + (even + odd));
    }
    _mm_setcsr(before);
}

}  // namespace sparring::software
