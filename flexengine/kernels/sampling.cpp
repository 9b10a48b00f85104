// Choice of the next token of each row of logits: top-k, top-p, min-p, one draw; log probabilities. One thread computes
// a row, in an order that depends on this row alone.
//
// Tokens are ordered by falling value, of equal values by rising id. Each of top-k, top-p and min-p keeps a beginning
// of this order: all tokens above some value are kept for certain, all below another one are removed, and only a band
// between is listed and looked at closer. Nothing is sorted but a few tokens at the end of what top-p keeps. A row is
// read in blocks, whose largest values show which blocks a step can leave out.
#include <omp.h>

#include <algorithm>
#include <functional>

#include "doubles.h"

struct Sampling {
    const float* logits;  // [rows, words]; row r begins at logits + r * stride
    const double *temperature, *top_p, *min_p, *points;  // [rows]; temperature 0: the largest
    const int64_t* top_k;   // [rows]; 0 keeps all
    const int64_t* listed;  // [rows]; number of most likely tokens to list, at most `width`; -1: no log probability
    const int64_t *first, *ids;  // [rows + 1]; edits first[r] .. first[r + 1] - 1 are of row r, with rising ids
    const double* values;   // of the edits: these replace the logits
    int64_t* tokens;        // [rows], or -1
    double* logprobs;       // [rows]
    int64_t* likeliest;     // [rows, width]; -1 behind the last one
    double* likely;         // [rows, width], their log probabilities
    void* scratch;          // [threads, bytes of flex_sampling_bytes]
    int64_t rows, words, stride, width;
    int32_t threads;
};

FLEX_SIZE(sampling, Sampling)

namespace {

constexpr int BLOCK = 128, BUCKETS = 512;
constexpr int64_t LOOKS = 8192;  // tokens from which the end of what top-p keeps is estimated

struct Token { double value, weight; int64_t id; };

inline bool ahead(const Token& a, const Token& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

struct Sampler {
    const Sampling& a;
    const int64_t blocks;
    double *raw, *top, *kept, *spare;  // [blocks] each: largest logit, largest value, sum of kept weights
    Token* tokens;                     // [words + BLOCK]

    // Of the row:
    int64_t r = 0, count = 0;  // count: listed tokens
    const float* row = nullptr;
    double best = 0, rate = 1;  // the weight of a value x is exp((x - best) * rate)
    double least = -INF;        // top-k keeps the values from here on
    double total = 0;           // weight of these
    bool whole = false;         // whether `total` is that of all values
    bool edited = false;        // whether blocks are read with the row's edits
    double buffer[BLOCK], weights[BLOCK];
    double found_values[BLOCK + LANES], found_weights[BLOCK + LANES];
    int64_t found_ids[BLOCK + LANES];
    float tail[BLOCK];

    static int64_t bytes(int64_t words) {
        const int64_t blocks = (words + BLOCK - 1) / BLOCK;
        return (blocks * 4 * 8 + (words + BLOCK) * int64_t(sizeof(Token)) + 63) / 64 * 64;
    }

    Sampler(const Sampling& args, void* scratch) : a(args), blocks((args.words + BLOCK - 1) / BLOCK) {
        raw = static_cast<double*>(scratch);
        top = raw + blocks, kept = top + blocks, spare = kept + blocks;
        tokens = reinterpret_cast<Token*>(spare + blocks);
    }

    const float* logits(int64_t b) const { return (b + 1) * BLOCK > a.words ? tail : row + b * BLOCK; }

    // Returns the values of a block, in `buffer`. Behind the last token they are -inf.
    double* values(int64_t b) {
        const float* p = logits(b);
        for (int i = 0; i < BLOCK; i += LANES) {
            const doubles x = __builtin_convertvector(loaded<floats>(p + i), doubles);
            memcpy(buffer + i, &x, sizeof(x));
        }
        if (edited) {
            const int64_t *from = a.ids + a.first[r], *to = a.ids + a.first[r + 1];
            for (auto id = std::lower_bound(from, to, b * BLOCK); id < to && *id < (b + 1) * BLOCK; id++) {
                buffer[*id - b * BLOCK] = a.values[id - a.ids];
            }
        }
        return buffer;
    }

    // Reads the row. Returns whether its largest logit is finite.
    bool open(int64_t number) {
        r = number, row = a.logits + r * a.stride;
        const int64_t whole = a.words / BLOCK * BLOCK;
        for (int i = 0; i < BLOCK; i++) tail[i] = whole + i < a.words ? row[whole + i] : -INFINITY;
        typedef float wide __attribute__((vector_size(64)));
        typedef int32_t marks __attribute__((vector_size(64)));
        double largest = -INF;
        marks broken = {};
        for (int64_t b = 0; b < blocks; b++) {
            const float* p = logits(b);
            wide m = loaded<wide>(p);
            broken |= m != m;
            for (int i = 16; i < BLOCK; i += 16) {
                const wide x = loaded<wide>(p + i);
                broken |= x != x;
                m = x > m ? x : m;
            }
            float all[16];
            memcpy(all, &m, sizeof(m));
            for (int half = 8; half; half /= 2) {
                for (int e = 0; e < half; e++) all[e] = all[e + half] > all[e] ? all[e + half] : all[e];
            }
            raw[b] = all[0];
            largest = std::max(largest, raw[b]);
        }
        for (int e = 0; e < 16; e++) {
            if (broken[e]) return false;
        }
        best = largest;
        return std::isfinite(largest);
    }

    // Applies the edits: `top` and `best` are then those of the values.
    void edit() {
        memcpy(top, raw, size_t(blocks) * 8);
        const int64_t from = a.first[r], to = a.first[r + 1];
        edited = to > from;
        for (int64_t i = from, b = -1; i < to; i++) {
            if (a.ids[i] / BLOCK == b) continue;
            b = a.ids[i] / BLOCK;
            top[b] = *std::max_element(values(b), buffer + BLOCK);
        }
        if (edited) best = *std::max_element(top, top + blocks);
    }

    int64_t greedy() {
        const int64_t b = std::find(top, top + blocks, best) - top;
        return b * BLOCK + (std::find(values(b), buffer + BLOCK, best) - buffer);
    }

    // Lists the values from `low` on of the blocks that may have some. tops: the blocks' largest values.
    void list(double low, const double* tops) {
        count = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (tops[b] < low) continue;
            const double* x = values(b);
            for (int i = 0; i < BLOCK; i += LANES) {
                for (unsigned in = within(loaded<doubles>(x + i), low, INF); in; in &= in - 1) {
                    const int e = i + __builtin_ctz(in);
                    tokens[count++] = {x[e], 0, b * BLOCK + e};
                }
            }
        }
        while (count && tokens[count - 1].id >= a.words) count--;
    }

    // Lists the k tokens with the largest values, and maybe more. The k-th largest of the blocks' largest values is a
    // lower bound of the k-th largest value.
    void list_largest(int64_t k, const double* tops) {
        double low = -INF;
        if (k <= blocks) {
            memcpy(spare, tops, size_t(blocks) * 8);
            std::nth_element(spare, spare + k - 1, spare + blocks, std::greater<double>());
            low = spare[k - 1];
        }
        list(low, tops);
    }

    double kth_value(int64_t k) {
        list_largest(k, top);
        std::nth_element(tokens, tokens + k - 1, tokens + count, ahead);
        return tokens[k - 1].value;
    }

    // Sums the weights of each block: `total` of the values from `least` on, `kept` of those above `high`. Lists the
    // tokens from `low` to `high`. summed: whether `total` is used; else blocks without kept tokens are left out.
    void sweep(double low, double high, bool summed) {
        const double skipped = std::max(least, summed ? -INF : low);
        const bool all = least == -INF && high == -INF;
        total = 0, count = 0, whole = skipped == -INF;
        const int64_t *id = a.ids + a.first[r], *end = edited ? a.ids + a.first[r + 1] : id;
        for (int64_t b = 0; b < blocks; b++) {
            kept[b] = 0;
            if (top[b] < skipped) continue;
            while (id < end && *id < b * BLOCK) id++;
            const bool own = id < end && *id < (b + 1) * BLOCK;  // it has edits
            if (all) {
                total += kept[b] = own ? weight_of(values(b)) : weight_of(logits(b));
            } else if (own) {
                divide(b, values(b), low, high);
            } else {
                divide(b, logits(b), low, high);
            }
        }
    }

    static doubles eight(const double* x) { return loaded<doubles>(x); }
    static doubles eight(const float* x) { return __builtin_convertvector(loaded<floats>(x), doubles); }

    template <class T> double weight_of(const T* x) const {
        doubles first = {}, second = {};
        for (int i = 0; i < BLOCK; i += 2 * LANES) {
            first += exp_of((eight(x + i) - best) * rate);
            second += exp_of((eight(x + i + LANES) - best) * rate);
        }
        return sum(first + second);
    }

    template <class T> void divide(int64_t b, const T* x, double low, double high) {
        doubles all = {}, above = {};
        int listed = 0;
        for (int i = 0; i < BLOCK; i += LANES) {
            const doubles value = eight(x + i), weight = exp_of((value - best) * rate);
            all += where(value >= least, weight);
            above += where(value > high, weight);
            const unsigned in = within(value, low, high);
            if (in) listed = append(value, weight, in, b * BLOCK + i, listed);
        }
        for (int e = 0; e < listed; e++) {
            if (found_weights[e] > 0) tokens[count++] = {found_values[e], found_weights[e], found_ids[e]};
        }
        total += sum(all), kept[b] = sum(above);
    }

    // Adds the tokens of the bits `in`, of which the first is `id`, to the n that were found in a block. Returns their
    // number.
    int append(doubles value, doubles weight, unsigned in, int64_t id, int n) {
#if defined(FLEX_AVX512)
        const __m512i ids = _mm512_add_epi64(_mm512_set1_epi64(id), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
        _mm512_storeu_pd(found_values + n, _mm512_maskz_compress_pd(__mmask8(in), (__m512d)value));
        _mm512_storeu_pd(found_weights + n, _mm512_maskz_compress_pd(__mmask8(in), (__m512d)weight));
        _mm512_storeu_si512(found_ids + n, _mm512_maskz_compress_epi64(__mmask8(in), ids));
        return n + __builtin_popcount(in);
#else
        for (; in; in &= in - 1, n++) {
            const int e = __builtin_ctz(in);
            found_values[n] = value[e], found_weights[n] = weight[e], found_ids[n] = id + e;
        }
        return n;
#endif
    }

    // Sets the weights of one block, and its values in `buffer`.
    void weigh(int64_t b) {
        const double* x = values(b);
        for (int i = 0; i < BLOCK; i += LANES) {
            const doubles weight = exp_of((loaded<doubles>(x + i) - best) * rate);
            memcpy(weights + i, &weight, sizeof(weight));
        }
    }

    // Returns the last token, in order, before which the weights of listed tokens have a sum below `room`; {-inf} if
    // that is so for all of them. room > 0; the listed values are finite. The list is then in another order.
    Token last_below(double room) const {
        Token *from = tokens, *to = tokens + count;
        bool inside = false;  // whether the end lies from `from` to `to` for certain
        while (to - from > 64) {
            double low = INF, high = -INF, sums[BUCKETS] = {};
            for (Token* t = from; t < to; t++) low = std::min(low, t->value), high = std::max(high, t->value);
            const double scale = BUCKETS / (high - low);
            if (low == high) {  // equal tokens: so many have place
                const double places = std::ceil(room / from->weight);
                if (places > double(to - from) && !inside) return {-INF, 0, 0};
                Token* last = from + int64_t(std::min(std::max(places, 1.0), double(to - from))) - 1;
                std::nth_element(from, last, to, ahead);
                return *last;
            }
            if (!(scale < 1e300)) break;
            auto bucket = [&](const Token& t) { return std::min(BUCKETS - 1, int((high - t.value) * scale)); };
            for (Token* t = from; t < to; t++) sums[bucket(*t)] += t->weight;
            int chosen = 0;
            while (chosen < BUCKETS && sums[chosen] < room) room -= sums[chosen++];
            if (chosen == BUCKETS && !inside) return {-INF, 0, 0};
            if (chosen == BUCKETS) room = sums[--chosen];  // by rounding
            Token* others = to;
            to = from;
            for (Token* t = from; t < others; t++) {
                if (bucket(*t) == chosen) std::swap(*to++, *t);
            }
            inside = true;
        }
        std::sort(from, to, ahead);
        for (; from < to; from++) {
            if (!(from->weight < room)) return *from;
            room -= from->weight;
        }
        return inside ? to[-1] : Token{-INF, 0, 0};
    }

    // Returns a value so that all tokens below it have at most half of the weight that top-p removes.
    double far(double p, double weight) const { return best + std::log((1 - p) / 2 * weight / double(a.words)) / rate; }

    // Estimates between which values top-p ends, from the largest value of each block and some other ones, which stand
    // for all others: a histogram of their weights, and of the squares, which give the error.
    void estimate(double p, double& low, double& high) const {
        constexpr int STEPS = 2048;
        const int64_t skip = std::max<int64_t>(1, blocks * LANES / LOOKS), looked = (blocks + skip - 1) / skip;
        const int each = int(std::min<int64_t>(BLOCK / LANES / 2, std::max<int64_t>(1, LOOKS / (looked * LANES))));
        const double part = (BLOCK - 1.0) * double(skip) / (each * LANES);
        double least_seen = best, sums[STEPS] = {}, squares[STEPS] = {};
        auto look = [&](auto f) {  // at vectors of the blocks; their places change from block to block
            for (int64_t b = 0; b < blocks; b += skip) {
                for (int i = 0; i < each; i++) {
                    f(b, eight(logits(b) + (i * (BLOCK / each) + b * LANES) % BLOCK / LANES * LANES));
                }
            }
        };
        look([&](int64_t, doubles x) {
            for (int e = 0; e < LANES; e++) least_seen = x[e] < least_seen && x[e] > -INF ? x[e] : least_seen;
        });
        const double range = std::min(40.0, (best - least_seen) * rate), scale = STEPS / range;
        low = -INF, high = INF;
        if (!(range > 1e-100)) return;
        auto step = [&](double x) { return int(std::min(STEPS - 1.0, std::max(0.0, (best - x) * rate * scale))); };
        for (int64_t b = 0; b < blocks; b += LANES) {
            doubles x;
            for (int e = 0; e < LANES; e++) x[e] = b + e < blocks ? top[b + e] : -INF;
            const doubles weight = exp_of((x - best) * rate);
            for (int e = 0; e < LANES; e++) sums[step(x[e])] += weight[e];
        }
        look([&](int64_t b, doubles x) {
            const doubles weight = exp_of((where(x < top[b], x - best) * rate)) * part;
            for (int e = 0; e < LANES; e++) {
                if (!(x[e] < top[b])) continue;
                sums[step(x[e])] += weight[e], squares[step(x[e])] += weight[e] * weight[e];
            }
        });
        double total_seen = 0, sum = 0, above = 0, below = 0;
        for (int i = 0; i < STEPS; i++) total_seen += sums[i];
        for (int i = 0; i < STEPS; i++) {
            (sum < p * total_seen ? above : below) += squares[i];
            sum += sums[i];
        }
        const double error = 3.5 * std::sqrt((1 - p) * (1 - p) * above + p * p * below) / total_seen;
        const double first = (p - error) * total_seen, last = (p + std::min(error, 0.9 * (1 - p))) * total_seen;
        int i = 0;
        for (sum = 0; i < STEPS - 1 && sum + sums[i] < first; i++) sum += sums[i];
        high = best - std::max(0, i - 1) / (scale * rate);  // a step more on both sides
        for (; i < STEPS - 1 && sum + sums[i] < last; i++) sum += sums[i];
        low = p < 0.998 && i < STEPS - 2 ? best - (i + 2) / (scale * rate) : far(p, total_seen / 2);
    }

    // Returns the last token that is kept, in order, after a `sweep` with what it says.
    Token end_of_kept() {
        const int64_t k = a.top_k[r];
        const double p = a.top_p[r], m = a.min_p[r], at = std::log(m), size = 1e-15 * std::fabs(best);
        least = 0 < k && k < a.words ? kth_value(k) : -INF;
        // The band in which min-p ends; its ends are off by more than rounding.
        const double low_m = m > 0 ? best + (at - 1e-9) / rate - size : -INF;
        const double high_m = m > 0 ? best + (at + 1e-9) / rate + size : -INF;
        const double below = std::nextafter(least, -INF);
        double low_p = -INF, high_p = -INF;
        if (p < 1) {
            high_p = INF;
            if (least == -INF && blocks >= 32) estimate(p, low_p, high_p);
        }
        Token end{};
        for (int retries = 0;; retries++) {
            const double high = std::max({high_p, high_m, below});
            sweep(std::max({low_p, low_m, least}), high, p < 1);
            end = {least, 0, a.words};
            if (p == 1) break;
            double room = p * total;
            for (int64_t b = 0; b < blocks; b++) room -= kept[b];
            const Token last = room > 0 ? last_below(room) : Token{INF, 0, 0};
            const bool over = room <= 0 && high < INF, under = last.value == -INF && low_p > std::max(low_m, least);
            if (last.value > -INF) end = last;
            if (!over && !under) break;
            low_p = retries ? -INF : far(p, total), high_p = over ? INF : high_p;  // the estimate failed
        }
        if (m > 0) {  // among the listed ones
            Token* to = std::remove_if(tokens, tokens + count, [&](const Token& t) { return t.weight < m; });
            count = to - tokens;
            const double high = std::max({high_p, high_m, below});
            double lowest = high;
            for (Token* t = tokens; t < to; t++) lowest = std::min(lowest, t->value);
            if (count == 0) lowest = std::nextafter(high, INF);
            if (lowest > end.value) end = {lowest, 0, a.words};
        }
        return end;
    }

    int64_t drawn() {
        const double heat = a.temperature[r];
        rate = std::min(1 / heat, DBL_MAX);  // else inf * 0 is NaN
        const Token end = end_of_kept();
        auto stays = [&](double x, int64_t id) { return x > end.value || (x == end.value && id <= end.id); };
        for (int64_t i = 0; i < count; i++) {
            if (stays(tokens[i].value, tokens[i].id)) kept[tokens[i].id / BLOCK] += tokens[i].weight;
        }
        double sum = 0, running = 0;
        for (int64_t b = 0; b < blocks; b++) sum += kept[b];
        const double point = std::min(sum * a.points[r], std::nextafter(sum, 0));  // the product may round up
        int64_t b = 0;
        while (b + 1 < blocks && !(running + kept[b] > point)) running += kept[b++];
        weigh(b);
        int64_t token = -1;
        for (int i = 0; i < BLOCK; i++) {
            if (weights[i] > 0 && stays(buffer[i], b * BLOCK + i)) {
                token = b * BLOCK + i;
                if ((running += weights[i]) > point) break;
            }
        }
        return token;  // rounding may end the block before the point: then it is the last token of the block
    }

    void report(bool weighed) {
        double *likely = a.likely + r * a.width, largest = -INF, logits = double(row[a.tokens[r]]);
        int64_t* likeliest = a.likeliest + r * a.width;
        edited = false;
        largest = *std::max_element(raw, raw + blocks);
        if (!weighed) {
            memcpy(top, raw, size_t(blocks) * 8);
            best = largest, rate = 1, least = -INF;
            sweep(-INF, -INF, true);
        }
        const double log_total = std::log(total);
        a.logprobs[r] = (logits - largest) - log_total;
        const int64_t n = std::min(a.listed[r], a.words);
        if (n > 0) {
            list_largest(n, raw);
            std::partial_sort(tokens, tokens + n, tokens + count, ahead);
        }
        for (int64_t i = 0; i < a.width; i++) {
            const bool some = i < n && tokens[i].value > -INF;
            likeliest[i] = some ? tokens[i].id : -1;
            likely[i] = some ? (tokens[i].value - largest) - log_total : 0;
        }
    }

    void choose(int64_t number) {
        edited = whole = false;
        a.tokens[number] = -1;
        if (!open(number)) return;
        edit();
        if (best == -INF) return;
        const double heat = a.temperature[r];
        a.tokens[r] = heat == 0 ? greedy() : drawn();
        if (a.listed[r] < 0) return;
        // The weights of a row without edits, at temperature 1, are those of its log probabilities.
        report(whole && heat == 1 && !edited);
    }
};

}  // namespace

extern "C" {

// Returns the bytes of scratch memory per thread, a multiple of 64.
int64_t flex_sampling_bytes(int64_t words) { return Sampler::bytes(words); }

void flex_sampling_run(const Sampling* args) {
#pragma omp parallel num_threads(args->threads)
    {
        const int64_t bytes = Sampler::bytes(args->words) * omp_get_thread_num();
        Sampler sampler(*args, static_cast<char*>(args->scratch) + bytes);
#pragma omp for schedule(dynamic)
        for (int64_t r = 0; r < args->rows; r++) sampler.choose(r);
    }
}

}  // extern "C"
