// Drawing one token from one row of logits (see kernels/sampling.py, which says what is meant).
#pragma once
#include "vec.h"
#include <stdlib.h>

typedef struct {
    float weight;
    int32_t id;
} candidate;

typedef struct {
    const float *logits;
    int64_t *tokens;
    const float *temperature, *top_p, *min_p;
    const int32_t *top_k;
    const double *uniforms;
    int32_t rows, vocabulary;
} draw_call;

#define CHUNK 1024

static int by_weight(const void *a_, const void *b_) {
    const candidate *a = a_, *b = b_;
    if (a->weight != b->weight) return a->weight < b->weight ? 1 : -1;
    return a->id < b->id ? -1 : 1;
}

static int likeliest(const float *x, int n) {
    f32v most = splat(-INFINITY);
    int i = 0;
    for (; i + LANES <= n; i += LANES) most = max_lanes(most, load(x + i));
    float top = max_of(most);
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

// weights = exp((x - max) / temperature); returns their sum.
static double exponentiate(const float *x, int n, float max, float temperature, float *weights) {
    double total = 0;
    float inverse = 1.0f / temperature;
    for (int chunk = 0; chunk < n; chunk += CHUNK) {
        int end = chunk + CHUNK < n ? chunk + CHUNK : n, i = chunk;
        f32v sum = splat(0);
        for (; i + LANES <= end; i += LANES) {
            f32v w = exp_lanes((load(x + i) - max) * inverse);
            store(weights + i, w);
            sum += w;
        }
        total += sum_lanes(sum);
        for (; i < end; i++) {
            weights[i] = exp_one((x[i] - max) * inverse);
            total += weights[i];
        }
    }
    return total;
}

static int invert(const float *weights, int n, double target) {
    double sum = 0;
    int last = 0;
    for (int chunk = 0; chunk < n; chunk += CHUNK) {
        int end = chunk + CHUNK < n ? chunk + CHUNK : n, i = chunk;
        f32v part = splat(0);
        for (; i + LANES <= end; i += LANES) part += load(weights + i);
        double here = sum_lanes(part);
        for (; i < end; i++) here += weights[i];
        if (sum + here > target || end == n) {
            for (i = chunk; i < end; i++) {
                sum += weights[i];
                if (weights[i] > 0) last = i;
                if (sum > target && weights[i] > 0) return i;
            }
        } else {
            sum += here;
        }
    }
    return last;
}

// All weights of at least a threshold, lowered until the filters cannot want more; returns how many.
static int gather(const float *weights, int n, double total, int top_k, float top_p, float min_p, candidate *out) {
    for (float threshold = 1.0f / 64;; threshold /= 4096) {
        int everything = threshold < 1e-20f, count = 0;
        double mass = 0;
        for (int i = 0; i < n; i++) {
            if (everything || weights[i] >= threshold) {
                out[count++] = (candidate){weights[i], i};
                mass += weights[i];
            }
        }
        int enough = top_k > 0 ? count >= top_k : (top_p < 1 && mass >= (double)top_p * total);
        // what min-p drops still counts in the sum that top-p is a share of, where top-k makes that sum
        int dropped = min_p > 0 && threshold <= min_p && (top_k <= 0 || top_p >= 1);
        if (enough || everything || dropped) return count;
    }
}

static int64_t draw_row(const draw_call *c, int row, float *weights, candidate *candidates) {
    const float *x = c->logits + (size_t)row * c->vocabulary;
    int n = c->vocabulary, best = likeliest(x, n), top_k = c->top_k[row];
    float temperature = c->temperature[row], top_p = c->top_p[row], min_p = c->min_p[row];
    if (!(temperature > 0)) return best;
    double total = exponentiate(x, n, x[best], temperature, weights);
    if (top_k <= 0 && top_p >= 1 && min_p <= 0) return invert(weights, n, c->uniforms[row] * total);
    int count = gather(weights, n, total, top_k, top_p, min_p, candidates);
    qsort(candidates, (size_t)count, sizeof *candidates, by_weight);
    if (top_k > 0 && count > top_k) count = top_k;
    if (top_k > 0) {
        total = 0;
        for (int i = 0; i < count; i++) total += candidates[i].weight;
    }
    double before = 0;
    int kept = 0;
    while (kept < count) {
        float weight = candidates[kept].weight;
        if (kept && top_p < 1 && before >= (double)top_p * total) break;
        if (kept && weight < min_p * candidates[0].weight) break;
        before += weight;
        kept++;
    }
    double target = c->uniforms[row] * before, sum = 0;
    for (int i = 0; i < kept; i++) {
        sum += candidates[i].weight;
        if (sum > target) return candidates[i].id;
    }
    return kept ? candidates[kept - 1].id : best;
}
