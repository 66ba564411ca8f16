/* Attention of one new token per request over a cache of bf16 keys and values, for CPUs with AVX-512 bf16.

   Every request and key/value head is one piece of work: the heads that share its keys read them once, keys that the
   mask hides are not read at all, and sums run in fp32. The plain twin is SDPA (tests/test_native.py). */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#define AHEAD 32 /* rows fetched ahead: the prefetcher of the CPU stops at page borders */

static inline __m512 wide(const uint16_t *x) { /* 16 bf16 as fp32 */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}

static inline __m512 exp16(__m512 x) { /* 2^n * 2^f, |f| <= 1/2, the latter by its series: relative error below 2e-7 */
    __m512 t = _mm512_mul_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(1.44269504f));
    __m512 n = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_mul_ps(_mm512_sub_ps(t, n), _mm512_set1_ps(0.69314718f));
    __m512 y = _mm512_set1_ps(1.0f / 720);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

/* exp(x - max) in place, padded to whole vectors with zeros; returns 1 / sum. */
static float softmax(float *x, int64_t n) {
    int64_t whole = (n + 15) / 16 * 16;
    for (int64_t i = n; i < whole; i++) x[i] = -INFINITY;
    __m512 top = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < whole; i += 16) top = _mm512_max_ps(top, _mm512_loadu_ps(x + i));
    __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(top));
    for (int64_t i = 0; i < whole; i += 16) {
        __m512 y = exp16(_mm512_sub_ps(_mm512_loadu_ps(x + i), most));
        _mm512_storeu_ps(x + i, y);
        if (i + 16 > n) y = _mm512_maskz_mov_ps((__mmask16)((1u << (n - i)) - 1), y);
        sum = _mm512_add_ps(sum, y);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

static inline __attribute__((always_inline)) void one(const uint16_t *query, const uint16_t *k, const uint16_t *v,
                                                      uint16_t *out, const int32_t *seen, float *score, int64_t n,
                                                      int64_t room, int64_t width, int64_t stride_slot, float scale,
                                                      const int heads, const int many) {
    for (int64_t i = 0; i < n; i++) {
        const uint16_t *row = k + seen[i] * stride_slot;
        for (int64_t p = 0; p < width; p += 32) _mm_prefetch(row + AHEAD * stride_slot + p, _MM_HINT_T0);
        __m512 sum[heads];
        for (int h = 0; h < heads; h++) sum[h] = _mm512_setzero_ps();
        for (int64_t p = 0; p < width; p += 32) {
            __m512bh key = (__m512bh)_mm512_loadu_si512(row + p);
            for (int h = 0; h < heads; h++)
                sum[h] = _mm512_dpbf16_ps(sum[h], (__m512bh)_mm512_loadu_si512(query + h * width + p), key);
        }
        for (int h = 0; h < heads; h++) score[h * room + i] = scale * _mm512_reduce_add_ps(sum[h]);
    }
    for (int h = 0; h < heads; h++) {
        float *p = score + h * room;
        float inverse = n ? softmax(p, n) : 0.0f;
        for (int64_t i = 0; i < n; i++) p[i] *= inverse;
    }
    for (int64_t d = 0; d < width; d += 16 * many) {
        __m512 sum[heads][many];
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < many; j++) sum[h][j] = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i++) {
            const uint16_t *row = v + seen[i] * stride_slot + d;
            __m512 x[many];
            for (int j = 0; j < many; j += 2) _mm_prefetch(row + AHEAD * stride_slot + 16 * j, _MM_HINT_T0);
            for (int j = 0; j < many; j++) x[j] = wide(row + 16 * j);
            for (int h = 0; h < heads; h++) {
                __m512 p = _mm512_set1_ps(score[h * room + i]);
                for (int j = 0; j < many; j++) sum[h][j] = _mm512_fmadd_ps(p, x[j], sum[h][j]);
            }
        }
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < many; j += 2)
                _mm512_storeu_si512(out + h * width + d + 16 * j,
                                    (__m512i)_mm512_cvtne2ps_pbh(sum[h][j + 1], sum[h][j]));
    }
}

/* query, out [B, G * heads, width]; keys, values [B, G, S, width] with strides in elements; mask [B, S], a byte each,
   or NULL. Returns 0, or 1 for a shape that it does not take, or 2 without memory. */
int attend(const uint16_t *query, const uint16_t *keys, const uint16_t *values, uint16_t *out, const uint8_t *mask,
           int64_t requests, int64_t groups, int64_t heads, int64_t slots, int64_t width, int64_t stride_request,
           int64_t stride_group, int64_t stride_slot, int64_t stride_mask, float scale) {
    if (heads < 1 || heads > 8 || width % 32 || slots < 1) return 1;
    int failed = 0;
    int64_t room = (slots + 15) / 16 * 16;
#pragma omp parallel
    {
        float *score = malloc(sizeof(float) * room * heads);
        int32_t *seen = malloc(sizeof(int32_t) * slots);
        if (!score || !seen) {
#pragma omp atomic write
            failed = 2;
        }
#pragma omp for schedule(static)
        for (int64_t work = 0; work < requests * groups; work++) {
            if (!score || !seen) continue;
            int64_t b = work / groups, g = work % groups, n = 0;
            for (int64_t s = 0; s < slots; s++)
                if (!mask || mask[b * stride_mask + s]) seen[n++] = (int32_t)s;
            const uint16_t *k = keys + b * stride_request + g * stride_group;
            const uint16_t *v = values + b * stride_request + g * stride_group;
            int64_t first = (b * groups + g) * heads * width;
#define CASE(heads)                                                                                                   \
    case heads:                                                                                                        \
        if (width % 64 || heads > 5)                                                                                   \
            one(query + first, k, v, out + first, seen, score, n, room, width, stride_slot, scale, heads, 2);          \
        else                                                                                                           \
            one(query + first, k, v, out + first, seen, score, n, room, width, stride_slot, scale, heads, 4);          \
        break;
            switch (heads) {
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
            }
        }
        free(score);
        free(seen);
    }
    return failed;
}
