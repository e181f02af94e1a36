// The sizing of drafts: one call for the decisions of a step; README.md describes it, reference.py specifies it.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "parallel.h"  // every library exports what it includes
#include "replayable.h"

namespace {

constexpr int64_t kDrawn = 2, kLength = 24, kMaxDepth = 8, kMaxRank = 4, kBins = 10, kShared = 2, kSharedLater = 16;
constexpr double kLargestLogit = 12, kLargestWeight = 4, kLargestOffset = 8, kLargestOfRow = 2.5;
constexpr double kRateOfWeight = 0.01, kRateOfRow = 0.25, kLastCount = 100, kFading = 0.999;
constexpr double kWeightOfOdds = 0.05, kWeightOfThreshold = 0.1, kShareBelow = 1.0;

// operands.SizerState
struct State {
  const int64_t *depths, *ranks;
  double *weights, *offsets, *counts, *of_row, *bins, *odds, *values_of_mode, *values_of_row;
  int64_t *next_of_mode, *shared_of_mode, *next_of_row;
  double *threshold, *seconds;
  int64_t width, max_nodes, candidates, num_depths, num_ranks;
};

// operands.Drafted
struct Drafted {
  const int64_t *rows, *modes, *max_depths, *places;
  int64_t* parents;
  double *logits, *p;
  uint8_t* kept;
  int64_t stride;  // from row to row of [B', C]
};

// operands.TreeArrays
struct TreeArrays {
  int64_t *tokens, *parents, *candidates, *num_nodes, *places, *nodes, *firsts, *num_live;
  int64_t stride;  // from row to row of [B, N]
};

// operands.Chosen
struct Chosen {
  int64_t num_nodes, width, is_chain;
  double expected;
};

// operands.Offer
struct Offer {
  const int64_t *tokens, *parents;
  const float* logp;
  const int64_t *depths, *ranks;
  const double* seconds;
  int64_t rows, candidates, tokens_row, parents_row, logp_row, depths_row, ranks_row;
  int64_t batch, padded, depth, most_nodes, nodes_per_row;

  int64_t depth_of(int64_t i, int64_t c) const { return depths[i * depths_row + c]; }
  int64_t rank_of(int64_t i, int64_t c) const { return ranks[i * ranks_row + c]; }
  int64_t parent_of(int64_t i, int64_t c) const { return parents[i * parents_row + c]; }
};

struct Valued {
  double value;
  int64_t at;
};
bool is_better(const Valued& a, const Valued& b) { return a.value != b.value ? a.value > b.value : a.at < b.at; }

// Adds the time of its life to a sum of seconds.
class Stopwatch {
 public:
  explicit Stopwatch(double* sum) : sum_(sum) {}
  ~Stopwatch() { *sum_ += std::chrono::duration<double>(Clock::now() - began_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  double* sum_;
  Clock::time_point began_ = Clock::now();
};

double clipped(double x, double bound) { return std::min(std::max(x, -bound), bound); }

double logit_of(float given) {
  double logp = static_cast<double>(given);
  if (!(logp > -1e4)) logp = -1e4;
  logp = std::min(logp, -1e-9);
  return clipped(logp - std::log(-std::expm1(logp)), kLargestLogit);
}

// The logit of a probability, not beyond those of 1 and 99 %.
double bounded_logit(double p) {
  p = std::min(std::max(p, 0.01), 0.99);
  return std::log(p / (1 - p));
}

int64_t offset_at(int64_t mode, int64_t depth, int64_t rank) {
  return (mode * kMaxDepth + std::min(depth, kMaxDepth) - 1) * kMaxRank + std::min(rank, kMaxRank - 1);
}

struct Best {
  int64_t number;
  double rate, threshold;
};

// pool: falling values above 0.
Best best_number(const std::vector<Valued>& pool, int64_t nodes, double tokens, const double* seconds, int64_t most) {
  const int64_t count = std::min<int64_t>(static_cast<int64_t>(pool.size()), most - nodes);
  Best best{0, tokens / seconds[nodes], 0};
  double expected = 0;
  for (int64_t k = 1; k <= count; ++k) {
    expected += pool[k - 1].value;
    const double rate = (tokens + expected) / seconds[nodes + k];
    if (rate > best.rate) best = {k, rate, 0};
  }
  const double last = best.number > 0 ? pool[best.number - 1].value : 1.0;
  best.threshold = (last + (best.number < count ? pool[best.number].value : 0.0)) / 2;
  return best;
}

// Sets all but the best max_nodes - 1 values of a row to 0.
void cap(double* values, int64_t count, int64_t max_nodes) {
  if (count < max_nodes) return;
  static thread_local std::vector<Valued> order;
  order.clear();
  for (int64_t c = 0; c < count; ++c) order.push_back({values[c], c});
  std::sort(order.begin(), order.end(), is_better);
  for (int64_t i = max_nodes - 1; i < count; ++i) values[order[i].at] = 0;
}

void fill(const State& s, const double* values, int64_t count, int64_t depth, int64_t mode, double shift,
          double* result) {
  static thread_local std::vector<double> above, level;
  std::fill_n(result, s.candidates, 0.0);
  std::copy_n(values, count, result);
  above.assign(1, 1.0);
  if (depth > 0) {
    above.clear();
    for (int64_t c = 0; c < count; ++c)
      if (s.depths[c] == depth) above.push_back(values[c]);
    std::sort(above.rbegin(), above.rend());
  }
  const double against = std::exp(-shift);
  int64_t c = 0;
  for (int64_t d = depth + 1; d <= s.num_depths; ++d) {
    while (c < s.candidates && s.depths[c] < d) ++c;
    level.clear();
    for (int64_t i = 0; c < s.candidates && s.depths[c] == d; ++i, ++c) {
      const int64_t parent = std::min<int64_t>(i / s.num_ranks, static_cast<int64_t>(above.size()) - 1);
      const double odds = s.odds[(mode * s.num_depths + d - 1) * s.num_ranks + s.ranks[c]];
      result[c] = above[parent] * (odds / (odds + (1 - odds) * against));
      level.push_back(result[c]);
    }
    std::sort(level.rbegin(), level.rend());
    level.resize(std::min<int64_t>(s.width, static_cast<int64_t>(level.size())));
    above = level;
  }
}

void remember(const State& s, int64_t row, int64_t mode, const double* values, const double* p, int64_t count,
              int64_t depth, int64_t rows) {
  for (int64_t c = 0; c < count; ++c) {
    double& odds = s.odds[(mode * s.num_depths + s.depths[c] - 1) * s.num_ranks + s.ranks[c]];
    if (p[c] > 0) odds += kWeightOfOdds * values[c] / p[c] * (p[c] - odds);
  }
  double* found = s.values_of_row + (row * kLength + s.next_of_row[row] % kLength) * s.candidates;
  const int64_t last = std::find(s.depths, s.depths + count, depth) - s.depths;
  const double usual = s.odds[(mode * s.num_depths + depth - 1) * s.num_ranks + s.ranks[last]];
  const double above = bounded_logit(p[last]) - bounded_logit(usual);
  fill(s, values, count, depth, mode, s.of_row[row] + kShareBelow * above, found);
  ++s.next_of_row[row];
  const int64_t interval = s.shared_of_mode[mode] < kLength ? 1 : kSharedLater;
  if (++s.next_of_mode[mode] % std::max<int64_t>(rows / kShared, interval) == 0)
    std::copy_n(found, s.candidates,
                s.values_of_mode + (mode * kLength + s.shared_of_mode[mode]++ % kLength) * s.candidates);
}

void calibrate(const State& s, const Drafted& d, const Offer& o) {
  for (int64_t i = 0; i < o.rows; ++i)
    for (int64_t c = 0; c < o.candidates; ++c) {
      const float logp = o.logp[i * o.logp_row + c];
      const int64_t mode = d.modes[i], depth = o.depth_of(i, c), at = i * d.stride + c;
      d.logits[at] = logit_of(logp);
      const double score = s.weights[mode] * d.logits[at] + s.offsets[offset_at(mode, depth, o.rank_of(i, c))] +
                           s.of_row[d.rows[i]];
      const bool exists = logp > -INFINITY && depth <= d.max_depths[i];
      d.p[at] = exists ? 1 / (1 + std::exp(-score)) : 0;
    }
}

void keep_fixed(const State& s, const Drafted& d, const Offer& o, const std::vector<double>& values) {
  std::vector<Valued> order;
  for (int64_t i = 0; i < o.rows; ++i) {
    order.clear();
    for (int64_t c = 0; c < o.candidates; ++c) {
      const double value = values[i * o.candidates + c];
      order.push_back({s.width == 1 ? -static_cast<double>(o.rank_of(i, c)) : value, c});
    }
    std::sort(order.begin(), order.end(), is_better);
    for (int64_t n = 0; n < std::min(o.nodes_per_row - 1, o.candidates); ++n)
      d.kept[i * d.stride + order[n].at] = values[i * o.candidates + order[n].at] > 0;
  }
}

void keep_paying(const State& s, const Drafted& d, const Offer& o, std::vector<double> values) {
  static thread_local std::vector<Valued> all, rest;
  const double* seconds = o.seconds + (o.batch - o.rows);
  const int64_t most = o.most_nodes - (o.batch - o.rows);
  const double threshold = *s.threshold;
  all.clear(), rest.clear();
  int64_t nodes = o.rows;
  double tokens = static_cast<double>(o.rows);
  for (int64_t i = 0; i < o.rows; ++i) {
    cap(&values[i * o.candidates], o.candidates, s.max_nodes);
    for (int64_t c = 0; c < o.candidates; ++c) {
      const double value = values[i * o.candidates + c];
      if (!(value > 0)) continue;
      all.push_back({value, i * o.candidates + c});
      if (d.modes[i] != kDrawn) {
        rest.push_back(all.back());
      } else if (value >= threshold) {
        d.kept[i * d.stride + c] = 1, ++nodes, tokens += value;
      }
    }
  }
  std::sort(all.begin(), all.end(), is_better);
  *s.threshold += kWeightOfThreshold *
                  (best_number(all, o.rows, static_cast<double>(o.rows), seconds, most).threshold - threshold);
  std::sort(rest.begin(), rest.end(), is_better);
  const int64_t number = best_number(rest, nodes, tokens, seconds, most).number;
  for (int64_t k = 0; k < number; ++k)
    d.kept[rest[k].at / o.candidates * d.stride + rest[k].at % o.candidates] = 1;
}

Chosen write_trees(const Drafted& d, const TreeArrays& t, const Offer& o) {
  for (int64_t b = 0; b < o.padded; ++b) {
    std::fill_n(t.tokens + b * t.stride, t.stride, 0);
    std::fill_n(t.candidates + b * t.stride, t.stride, 0);
    std::fill_n(t.parents + b * t.stride, t.stride, -1);
    t.num_nodes[b] = b < o.batch;
  }
  Chosen chosen{o.batch, 1, 1, 0};
  static thread_local std::vector<int64_t> node_of;
  for (int64_t i = 0; i < o.rows; ++i) {
    const int64_t at = d.places[i] * t.stride;
    int64_t node = 0;
    node_of.assign(o.candidates + 1, 0);
    for (int64_t c = 0; c < o.candidates; ++c) {
      if (!d.kept[i * d.stride + c]) continue;
      node_of[c + 1] = ++node;
      t.tokens[at + node] = o.tokens[i * o.tokens_row + c];
      t.parents[at + node] = node_of[o.parent_of(i, c)];
      t.candidates[at + node] = c + 1;
      if (t.parents[at + node] != node - 1) chosen.is_chain = 0;
    }
    t.num_nodes[d.places[i]] = node + 1;
    chosen.num_nodes += node;
    chosen.width = std::max(chosen.width, node + 1);
  }
  return chosen;
}

void fit(const State& s, const Drafted& d, int64_t i, int64_t c, int64_t depth, int64_t rank, bool is_accepted) {
  const int64_t mode = d.modes[i], place = offset_at(mode, depth, rank), at = i * d.stride + c;
  const double p = d.p[at], logit = d.logits[at];
  double& of_row = s.of_row[d.rows[i]];
  const double score = s.weights[mode] * logit + s.offsets[place] + of_row;
  const double error = (is_accepted ? 1.0 : 0.0) - 1 / (1 + std::exp(-score));
  s.counts[place] = std::min(s.counts[place] + 1, kLastCount);
  s.offsets[place] = clipped(s.offsets[place] + 4 * error / s.counts[place], kLargestOffset);
  const double step = kRateOfWeight * error * logit / (1 + logit * logit / 4);
  s.weights[mode] = std::min(std::max(s.weights[mode] + step, 0.0), kLargestWeight);
  of_row = clipped(of_row + kRateOfRow * error, kLargestOfRow);
  for (int64_t b = 0; b < 3 * kBins; ++b) s.bins[b] *= kFading;
  double* bin = s.bins + 3 * std::min(static_cast<int64_t>(p * kBins), kBins - 1);
  bin[0] += 1, bin[1] += p, bin[2] += is_accepted ? 1 : 0;
}

}  // namespace

extern "C" {

void sizing_choose(const State* s, const Drafted* d, const TreeArrays* t, const Offer* o, Chosen* chosen) {
  static thread_local std::vector<double> values;
  const Stopwatch watch(s->seconds);
  calibrate(*s, *d, *o);
  values.assign(o->rows * o->candidates, 0.0);
  for (int64_t i = 0; i < o->rows; ++i) {
    double* of_row = &values[i * o->candidates];
    for (int64_t c = 0; c < o->candidates; ++c) {
      const int64_t parent = o->parent_of(i, c);
      d->parents[i * d->stride + c] = parent;
      of_row[c] = d->p[i * d->stride + c] * (parent > 0 ? of_row[parent - 1] : 1);
    }
    remember(*s, d->rows[i], d->modes[i], of_row, d->p + i * d->stride, o->candidates, o->depth,
             o->rows);
    std::fill_n(d->kept + i * d->stride, o->candidates, 0);
  }
  o->nodes_per_row > 0 ? keep_fixed(*s, *d, *o, values) : keep_paying(*s, *d, *o, values);
  double expected = static_cast<double>(o->batch);
  for (int64_t i = 0; i < o->rows; ++i)
    for (int64_t c = 0; c < o->candidates; ++c)
      if (d->kept[i * d->stride + c]) expected += values[i * o->candidates + c];
  *chosen = write_trees(*d, *t, *o);
  chosen->expected = expected;
}

// Rows [0, padded) in a layout of `width` nodes, packed into `places` tokens.
void sizing_pack(const TreeArrays* t, int64_t padded, int64_t width, int64_t places) {
  const int64_t total = std::accumulate(t->num_nodes, t->num_nodes + padded, int64_t{0});
  int64_t next = 0;
  for (int64_t b = 0; b < padded; ++b) {
    t->firsts[b] = next;
    for (int64_t n = 0; n < t->num_nodes[b]; ++n) t->places[next + n] = b * width + n;
    for (int64_t n = 0; n < width; ++n) {
      const int64_t node = next + std::min(n, std::max<int64_t>(t->num_nodes[b] - 1, 0));
      t->nodes[b * width + n] = std::min(node, total - 1);
    }
    next += t->num_nodes[b];
  }
  *t->num_live = total;
  for (; next < places; ++next) t->places[next] = 0;
}

// Nodes and counts of the batch's rows lie `paths_row` and `counts_row` apart.
void sizing_learn(const State* s, const Drafted* d, const Offer* o, const TreeArrays* t, const int64_t* paths,
                  int64_t paths_row, const int64_t* counts, int64_t counts_row) {
  static thread_local std::vector<uint8_t> accepted;
  const Stopwatch watch(s->seconds);
  for (int64_t i = 0; i < o->rows; ++i) {
    const int64_t place = d->places[i], *path = paths + place * paths_row, length = counts[place * counts_row];
    accepted.assign(o->candidates + 1, 0);
    accepted[0] = 1;
    for (int64_t n = 1; n <= length; ++n) accepted[t->candidates[place * t->stride + path[n]]] = 1;
    for (int64_t c = 0; c < o->candidates; ++c) {
      const int64_t at = i * d->stride + c;
      if (d->kept[at] && accepted[d->parents[at]])
        fit(*s, *d, i, c, o->depth_of(i, c), o->rank_of(i, c), accepted[c + 1]);
    }
  }
}

// seconds [depths, most + 1], places [num_places], chains [depths]; rates [2 * depths].
void sizing_look(const State* s, const int64_t* rows, const int64_t* max_depths, int64_t size, int64_t first,
                 int64_t number, const double* seconds, int64_t depths, int64_t most, const int64_t* places,
                 int64_t num_places, const double* chains, double* rates) {
  static thread_local std::vector<Valued> pool;
  static thread_local std::vector<double> values, times;
  times.assign(depths, 0.0);
  std::fill_n(rates, 2 * depths, 0.0);
  for (int64_t n = first; n < first + number; ++n)
    for (int64_t depth = 0; depth < depths; ++depth) {
      pool.clear();
      for (int64_t b = 0; b < size; ++b) {
        const double* kept = s->values_of_row + (rows[b] * kLength + (n + rows[b]) % kLength) * s->candidates;
        values.clear();
        for (int64_t c = 0; c < s->candidates && s->depths[c] <= depth; ++c)
          values.push_back(s->depths[c] <= max_depths[b] ? kept[c] : 0);
        cap(values.data(), static_cast<int64_t>(values.size()), s->max_nodes);
        for (const double value : values)
          if (value > 0) pool.push_back({value, 0});
      }
      std::sort(pool.begin(), pool.end(), is_better);
      const double* of_depth = seconds + depth * (most + 1);
      const Best best = best_number(pool, size, static_cast<double>(size), of_depth, most);
      const double took = of_depth[size + best.number];
      rates[depth] += best.rate * took, times[depth] += took;
    }
  for (int64_t depth = 0; depth < depths; ++depth) rates[depth] /= times[depth];
  double tokens = static_cast<double>(size);
  for (int64_t depth = 1; depth <= num_places; ++depth) {
    for (int64_t b = 0; b < size; ++b)
      for (int64_t n = 0; n < kLength; ++n)
        tokens += s->values_of_row[(rows[b] * kLength + n) * s->candidates + places[depth - 1]] / kLength;
    rates[depths + depth] = tokens / chains[depth];
  }
}

}  // extern "C"

SPECMAMBA_REPLAYABLE(sizing_choose)
SPECMAMBA_REPLAYABLE(sizing_learn)
SPECMAMBA_REPLAYABLE(sizing_pack)
