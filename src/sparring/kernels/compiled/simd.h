// Sixteen float lanes, the same operations in the same order on every machine.
//
// Three spellings of one type: AVX-512 (one register), AVX2 (two registers) and plain loops over std::fma.
// Every operation rounds as IEEE 754 says and multiplication and addition are fused only where fma() is written
// (the build passes -ffp-contract=off), so the three give the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace sparring {

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SPARRING_AVX512 1
constexpr int WIDE = 4;  // column vectors of one register tile: 6 x 4 accumulators fill 24 of 32 registers

using v16 = __m512;
static inline v16 load(const float *p) { return _mm512_loadu_ps(p); }
static inline void store(float *p, v16 a) { _mm512_storeu_ps(p, a); }
static inline v16 splat(float a) { return _mm512_set1_ps(a); }
static inline v16 fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 max(v16 a, v16 b) { return _mm512_max_ps(a, b); }
static inline v16 less_select(v16 a, v16 b, v16 yes, v16 no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}
// a * 2^n, where n sits in the low bits of `shifted` (see exp).
static inline v16 scale_by_power(v16 a, v16 shifted) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(a), _mm512_slli_epi32(_mm512_castps_si512(shifted), 23)));
}
static inline v16 load(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
static inline void store(bf16 *p, v16 a) {
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    bits = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), rounded, quiet);
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
}
#else
constexpr int WIDE = 1;

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
struct v16 {
    v8 low, high;
};
static inline v16 operator+(v16 a, v16 b) { return {a.low + b.low, a.high + b.high}; }
static inline v16 operator-(v16 a, v16 b) { return {a.low - b.low, a.high - b.high}; }
static inline v16 operator*(v16 a, v16 b) { return {a.low * b.low, a.high * b.high}; }
static inline v16 operator/(v16 a, v16 b) { return {a.low / b.low, a.high / b.high}; }
static inline v16 operator-(v16 a) { return {-a.low, -a.high}; }
static inline v16 load(const float *p) { return {*(const v8 *)p, *(const v8 *)(p + 8)}; }
static inline void store(float *p, v16 a) {
    *(v8 *)p = a.low;
    *(v8 *)(p + 8) = a.high;
}
static inline v16 splat(float a) {
    v8 half = {a, a, a, a, a, a, a, a};
    return {half, half};
}
static inline v8 fma8(v8 a, v8 b, v8 c) {
#if defined(__AVX2__) && defined(__FMA__)
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    v8 out;
    for (int i = 0; i < 8; i++) out[i] = std::fma(a[i], b[i], c[i]);
    return out;
#endif
}
static inline v16 fma(v16 a, v16 b, v16 c) { return {fma8(a.low, b.low, c.low), fma8(a.high, b.high, c.high)}; }
static inline v16 less_select(v16 a, v16 b, v16 yes, v16 no) {
    return {a.low < b.low ? yes.low : no.low, a.high < b.high ? yes.high : no.high};
}
static inline v16 max(v16 a, v16 b) { return less_select(b, a, a, b); }
static inline v16 scale_by_power(v16 a, v16 shifted) {
    return {(v8)((v8i)a.low + ((v8i)shifted.low << 23)), (v8)((v8i)a.high + ((v8i)shifted.high << 23))};
}
static inline v16 load(const bf16 *p) {
    alignas(64) uint32_t bits[LANES];
    for (int i = 0; i < LANES; i++) bits[i] = (uint32_t)p[i].bits << 16;
    return load((const float *)bits);
}
static inline void store(bf16 *p, v16 a) {
    alignas(64) float values[LANES];
    store(values, a);
    for (int i = 0; i < LANES; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        p[i].bits = (uint16_t)((is_nan ? bits | 0x400000 : bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}
#endif

#if defined(SPARRING_SOFTWARE_PAIRS) || (defined(SPARRING_AVX512) && defined(__AVX512BF16__))
#define SPARRING_PAIRS 1
// Two bfloat16 that stand beside each other. A sum grows by the products of sixteen pairs with sixteen others: by that
// of the odd ones, then of the even ones, each rounded; numbers below 2^-126 count as zero (VDPBF16PS).
struct pair {
    bf16 even, odd;
};
#ifdef SPARRING_SOFTWARE_PAIRS
// Slowly, for processors that do not multiply pairs: for tests, and for replaying what one that does has sampled.
struct v16_pairs {
    v16 even, odd;
};
static inline v16 flushed(v16 a) {
    return less_select(max(a, -a), splat(std::numeric_limits<float>::min()), a * splat(0.0f), a);
}
static inline v16_pairs load(const pair *p) {
    bf16 even[LANES], odd[LANES];
    for (int i = 0; i < LANES; i++) {
        even[i] = p[i].even;
        odd[i] = p[i].odd;
    }
    return {flushed(load(even)), flushed(load(odd))};
}
static inline v16_pairs splat(pair a) {
    pair all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = a;
    return load(all);
}
static inline v16 fma(v16_pairs a, v16_pairs b, v16 c) {
    return flushed(fma(a.even, b.even, flushed(fma(a.odd, b.odd, c))));
}
#else
using v16_pairs = __m512bh;
static inline v16_pairs load(const pair *p) { return (v16_pairs)_mm512_loadu_si512(p); }
static inline v16_pairs splat(pair a) {
    return (v16_pairs)_mm512_set1_epi32((int)(a.even.bits | (uint32_t)a.odd.bits << 16));
}
static inline v16 fma(v16_pairs a, v16_pairs b, v16 c) { return _mm512_dpbf16_ps(c, a, b); }
#endif
#endif

// A tail goes through the same lanes as a full vector: `count` values are read, the other lanes hold `fill`.
template <class T> static inline v16 load_tail(const T *p, int64_t count, float fill = 0.0f) {
    if (count >= LANES) return load(p);
#ifdef SPARRING_AVX512
    if constexpr (sizeof(T) == sizeof(float))
        return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), (__mmask16)((1 << count) - 1), p);
#endif
    T values[LANES] = {};
    memcpy(values, p, count * sizeof(T));
    alignas(64) float lanes[LANES];
    store(lanes, load(values));
    for (int64_t i = count; i < LANES; i++) lanes[i] = fill;
    return load(lanes);
}

template <class T> static inline void store_tail(T *p, int64_t count, v16 a) {
    if (count >= LANES) return store(p, a);
#ifdef SPARRING_AVX512
    if constexpr (sizeof(T) == sizeof(float)) return _mm512_mask_storeu_ps(p, (__mmask16)((1 << count) - 1), a);
#endif
    T values[LANES];
    store(values, a);
    memcpy(p, values, count * sizeof(T));
}

// Folds by halving: lane i with lane i + 8, then 4, 2, 1.
#ifdef SPARRING_AVX512
static inline float lane_sum(v16 a) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline float lane_max(v16 a) {
    __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#else
template <class Fold> static inline float fold_lanes(v16 a, Fold fold) {
    alignas(64) float lanes[LANES];
    store(lanes, a);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] = fold(lanes[i], lanes[i + half]);
    return lanes[0];
}

static inline float lane_sum(v16 a) {
    return fold_lanes(a, [](float x, float y) { return x + y; });
}

static inline float lane_max(v16 a) {
    return fold_lanes(a, [](float x, float y) { return x > y ? x : y; });
}
#endif

// Rows become columns: four stages, each of which exchanges one bit of the row's number with that bit of the lane's.
static inline void transpose(v16 (&rows)[LANES]) {
#ifdef SPARRING_AVX512
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
#pragma GCC unroll 4
    for (int bit = 1; bit < LANES; bit *= 2) {
        const __mmask16 upper = bit == 1 ? 0xaaaa : bit == 2 ? 0xcccc : bit == 4 ? 0xf0f0 : 0xff00;
        const __m512i step = _mm512_set1_epi32(bit), second = _mm512_set1_epi32(LANES);
        const __m512i first = _mm512_mask_add_epi32(lane, upper, _mm512_sub_epi32(lane, step), second);
        const __m512i last = _mm512_mask_add_epi32(_mm512_add_epi32(lane, step), upper, lane, second);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & bit) continue;
            v16 a = rows[i], b = rows[i + bit];
            rows[i] = _mm512_permutex2var_ps(a, first, b);
            rows[i + bit] = _mm512_permutex2var_ps(a, last, b);
        }
    }
#else
    float values[LANES][LANES], columns[LANES][LANES];
    for (int i = 0; i < LANES; i++) store(values[i], rows[i]);
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) columns[j][i] = values[i][j];
    for (int i = 0; i < LANES; i++) rows[i] = load(columns[i]);
#endif
}

// exp(x) = 2^n exp(r) with |r| <= ln(2)/2; polynomial of Cephes' expf (S. Moshier). About one unit in the last place;
// 0 below -87, infinity above 88.72.
static inline v16 exp(v16 x) {
    const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer that sits in the low bits
    v16 shifted = fma(x, splat(1.44269504088896341f), magic);
    v16 n = shifted - magic;
    v16 r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    v16 p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    v16 y = scale_by_power(p, shifted);
    y = less_select(x, splat(-87.0f), splat(0.0f), y);
    return less_select(splat(88.72f), x, splat(std::numeric_limits<float>::infinity()), y);
}

// Polynomial of Cephes' tanhf (S. Moshier) near zero, where 1 - 2 / (1 + exp(2 x)) would cancel.
static inline v16 tanh(v16 x) {
    v16 far = splat(1.0f) - splat(2.0f) / (splat(1.0f) + exp(x + x)), square = x * x;
    v16 p = fma(splat(-5.70498872745e-3f), square, splat(2.06390887954e-2f));
    p = fma(p, square, splat(-5.37397155531e-2f));
    p = fma(p, square, splat(1.33314422036e-1f));
    p = fma(p, square, splat(-3.33332819422e-1f));
    return less_select(square, splat(0.390625f), fma(p * square, x, x), far);
}

static inline v16 sigmoid(v16 x) { return splat(1.0f) / (splat(1.0f) + exp(-x)); }

}  // namespace sparring
