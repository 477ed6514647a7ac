// Sixteen floats at a time. GCC and Clang lower the vector types to what the machine has; where an instruction has no
// portable spelling, AVX-512 is written out. Fused multiply-add is explicit and contraction is off (see build.py), so
// that a row's arithmetic is the same whatever rows are computed beside it.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define LANES 16
#define GROUP 32
#define INLINE static inline __attribute__((always_inline))

typedef float f32v __attribute__((vector_size(64)));
typedef int32_t i32v __attribute__((vector_size(64)));
typedef uint16_t half;

INLINE f32v splat(float value) { return value - (f32v){}; }

INLINE f32v load(const float *from) {
    f32v out;
    memcpy(&out, from, sizeof out);
    return out;
}

INLINE void store(float *to, f32v value) { memcpy(to, &value, sizeof value); }

INLINE f32v fmadd(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
    return (f32v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

INLINE float half_to_float(half bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = bits & 0x7fffu, out;
    float value;
    if (rest >= 0x7c00u) {
        out = sign | 0x7f800000u | (rest & 0x3ffu) << 13;
    } else if (rest >= 0x400u) {
        out = sign | ((rest << 13) + 0x38000000u);
    } else {
        float small = (float)rest * 5.9604644775390625e-8f;
        memcpy(&out, &small, 4);
        out |= sign;
    }
    memcpy(&value, &out, 4);
    return value;
#endif
}

INLINE half float_to_half(float value) {
#if defined(__F16C__)
    return (half)_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (half)(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return (half)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        float scaled = fabsf(value) * 16777216.0f;
        return (half)(sign | (uint32_t)rintf(scaled));
    }
    uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
    return (half)(sign | rounded >> 13);
#endif
}

INLINE f32v load_half(const half *from) {
#if defined(__AVX512F__)
    return (f32v)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#else
    f32v out;
    for (int i = 0; i < LANES; i++) out[i] = half_to_float(from[i]);
    return out;
#endif
}

INLINE f32v max_lanes(f32v a, f32v b) {
#if defined(__AVX512F__)
    return (f32v)_mm512_max_ps((__m512)a, (__m512)b);
#else
    for (int i = 0; i < LANES; i++) a[i] = a[i] > b[i] ? a[i] : b[i];
    return a;
#endif
}

// Sums and maxima go by halves, in one fixed order.
INLINE float sum_lanes(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float part[LANES];
    store(part, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

INLINE float max_of(f32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#endif
    float part[LANES];
    store(part, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) part[i] = part[i] > part[i + width] ? part[i] : part[i + width];
    return part[0];
}

INLINE int32_t sum_whole(i32v v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#endif
    int32_t total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

// Lanes where `where` is all ones; 0 in the others, whatever stood there.
INLINE f32v keep_lanes(i32v where, f32v v) {
    i32v bits;
    memcpy(&bits, &v, sizeof bits);
    bits &= where;
    memcpy(&v, &bits, sizeof v);
    return v;
}

INLINE i32v nearest(f32v v) {
#if defined(__AVX512F__)
    return (i32v)_mm512_cvtps_epi32((__m512)v);
#endif
    i32v out;
    for (int i = 0; i < LANES; i++) out[i] = (int32_t)lrintf(v[i]);
    return out;
}

INLINE void store_bytes(int8_t *to, i32v v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
    for (int i = 0; i < LANES; i++) to[i] = (int8_t)v[i];
#endif
}

// e to the x, within 2 units in the last place, for x ≤ 88; very negative x gives 0.
INLINE f32v exp_lanes(f32v x) {
    const f32v magic = splat(12582912.0f);
    f32v low = max_lanes(x, splat(-87.0f));
    f32v turns = fmadd(low, splat(1.44269504088896341f), magic) - magic;
    f32v rest = fmadd(turns, splat(-0.693359375f), low);
    rest = fmadd(turns, splat(2.12194440e-4f), rest);
    f32v poly = splat(1.9875691500e-4f);
    poly = fmadd(poly, rest, splat(1.3981999507e-3f));
    poly = fmadd(poly, rest, splat(8.3334519073e-3f));
    poly = fmadd(poly, rest, splat(4.1665795894e-2f));
    poly = fmadd(poly, rest, splat(1.6666665459e-1f));
    poly = fmadd(poly, rest, splat(5.0000001201e-1f));
    poly = fmadd(poly, rest * rest, rest) + 1.0f;
    i32v power = (__builtin_convertvector(turns, i32v) + 127) << 23;
    f32v scale;
    memcpy(&scale, &power, sizeof scale);
    return keep_lanes(~(x < splat(-87.0f)), poly * scale);
}

INLINE float exp_one(float x) {
    f32v out = exp_lanes(splat(x));
    return out[0];
}
