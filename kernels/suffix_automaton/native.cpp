// Suffix automata and their drafts; README.md describes them, reference.py specifies them.
#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "parallel.h"  // every library exports what it includes

namespace {

constexpr int32_t kNone = -1, kRoot = 0;
constexpr int kMaxEdges = 64, kMaxLevels = 4;
constexpr double kLeastRest = 0.01;

// operands.DraftRule
struct Rule {
  const double* doubts;
  int64_t max_nodes, max_children, max_depth, max_width, max_match, min_match, handicap;
  double factor, min_probability, newest;
};

struct State {
  int32_t length, link, count, newest, first, last;  // first and last of its edges
};

struct Edge {
  int32_t source, token, target, next;
};

struct Match {
  int32_t state, length;
};

class Automaton {
 public:
  explicit Automaton(int32_t max_match) : max_match_(max_match), slots_(64, kNone) { add(0, kNone, 0, kNone); }

  int32_t extend(int32_t place, const int32_t* tokens, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      place = shortened(place);
      for (int32_t s = place; s != kRoot; s = states_[s].link) states_[s].newest = tokens[i];
      place = step(place, tokens[i]);  // not shortened: the edge to a longer state needs its count
      for (int32_t s = place; s != kRoot; s = states_[s].link) ++states_[s].count;
    }
    return shortened(place);
  }

  Match follow(Match match, int32_t token) const {
    auto [state, length] = match;
    int32_t edge = find(state, token);
    while (state != kRoot && edge == kNone) {
      state = states_[state].link;
      length = states_[state].length;
      edge = find(state, token);
    }
    if (edge == kNone) return {kRoot, 0};
    return {shortened(edges_[edge].target), std::min(length + 1, max_match_)};
  }

  Match match(const int32_t* text, int64_t size) const {
    Match found{kRoot, 0};
    for (int64_t i = std::max<int64_t>(0, size - max_match_); i < size; ++i) found = follow(found, text[i]);
    return found;
  }

  const State& state(int32_t number) const { return states_[number]; }
  const Edge& edge(int32_t number) const { return edges_[number]; }

  int64_t num_bytes() const {
    return static_cast<int64_t>(states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
                                slots_.capacity() * sizeof(int32_t));
  }

 private:
  // The state of the end of max_match_ tokens, or of the whole string where it has fewer.
  int32_t shortened(int32_t state) const {
    while (state != kRoot && states_[states_[state].link].length >= max_match_) state = states_[state].link;
    return state;
  }

  int32_t step(int32_t place, int32_t token) {
    const int32_t known = find(place, token);
    if (known != kNone) {
      const int32_t length = states_[place].length;
      const bool is_whole = states_[edges_[known].target].length == length + 1 || length >= max_match_;
      return is_whole ? edges_[known].target : split(place, token, edges_[known].target);
    }
    const int32_t added = add(states_[place].length + 1, kRoot, 0, kNone);
    int32_t state = place, edge = kNone;
    while (state != kNone && (edge = find(state, token)) == kNone) {
      connect(state, token, added);
      state = states_[state].link;
    }
    if (state != kNone) {
      const int32_t after = edges_[edge].target;
      const bool is_whole = states_[after].length == states_[state].length + 1;
      const int32_t link = is_whole ? after : split(state, token, after);
      states_[added].link = link;
    }
    return added;
  }

  int32_t split(int32_t state, int32_t token, int32_t after) {
    const State of = states_[after];
    const int32_t shorter = add(states_[state].length + 1, of.link, of.count, of.newest);
    for (int32_t e = of.first; e != kNone; e = edges_[e].next) connect(shorter, edges_[e].token, edges_[e].target);
    for (; state != kNone; state = states_[state].link) {
      const int32_t edge = find(state, token);
      if (edge == kNone || edges_[edge].target != after) break;
      edges_[edge].target = shorter;
    }
    states_[after].link = shorter;
    return shorter;
  }

  int32_t add(int32_t length, int32_t link, int32_t count, int32_t newest) {
    states_.push_back({length, link, count, newest, kNone, kNone});
    return static_cast<int32_t>(states_.size()) - 1;
  }

  void connect(int32_t source, int32_t token, int32_t target) {
    const int32_t number = static_cast<int32_t>(edges_.size());
    edges_.push_back({source, token, target, kNone});
    State& state = states_[source];
    (state.first == kNone ? state.first : edges_[state.last].next) = number;
    state.last = number;
    if (2 * edges_.size() > slots_.size()) {
      slots_.assign(2 * slots_.size(), kNone);
      for (size_t e = 0; e < edges_.size(); ++e) put(static_cast<int32_t>(e));
    } else {
      put(number);
    }
  }

  // Open addressing: the first free slot from the hash on.
  void put(int32_t edge) {
    size_t slot = hash(edges_[edge].source, edges_[edge].token);
    while (slots_[slot] != kNone) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = edge;
  }

  int32_t find(int32_t source, int32_t token) const {
    for (size_t slot = hash(source, token);; slot = (slot + 1) & (slots_.size() - 1)) {
      const int32_t edge = slots_[slot];
      if (edge == kNone || (edges_[edge].source == source && edges_[edge].token == token)) return edge;
    }
  }

  size_t hash(int32_t source, int32_t token) const {
    const uint64_t key = static_cast<uint64_t>(static_cast<uint32_t>(source)) << 32 | static_cast<uint32_t>(token);
    return (key * 0x9E3779B97F4A7C15u >> 24) & (slots_.size() - 1);
  }

  int32_t max_match_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> slots_;  // edges by source and token; a power of two
};

struct Level {
  int64_t rank;  // higher ones come first
  int32_t length, state;
  const Automaton* automaton;
};

struct Share {
  int32_t token;
  double mass;
};

struct Pending {
  double path, probability;
  int64_t number, token, parent, depth;
  size_t matches;  // of its parent
  bool operator<(const Pending& other) const { return path != other.path ? path < other.path : number > other.number; }
};

// One tree that grows.
class Draft {
 public:
  Draft(const Automaton* const* automata, int64_t count, const Rule& rule)
      : automata_(automata), count_(static_cast<size_t>(count)), rule_(rule) {
    size_t size = 64;
    while (size < 2 * count_ * kMaxEdges * kMaxLevels) size *= 2;
    places_.assign(size, kNone);
  }

  int64_t grow(const int32_t* text, int64_t size, int64_t* tokens, int64_t* parents, int64_t* depths, double* p) {
    for (size_t i = 0; i < count_; ++i) matches_.push_back(automata_[i]->match(text, size));
    find_levels(0);
    int32_t longest = 0;
    for (const Level& level : levels_) longest = std::max(longest, level.length);
    const int64_t by_factor = static_cast<int64_t>(std::min(rule_.factor * longest, 1e6));
    const int64_t deepest = std::min(rule_.max_depth, std::max<int64_t>(1, by_factor));
    std::vector<int64_t> width(static_cast<size_t>(deepest) + 1, 0);
    push(0, 0, 1, 1.0);
    int64_t made = 0;
    while (!pending_.empty() && made < rule_.max_nodes) {
      std::pop_heap(pending_.begin(), pending_.end());
      const Pending node = pending_.back();
      pending_.pop_back();
      if (width[node.depth] == rule_.max_width) continue;
      ++width[node.depth];
      tokens[made] = node.token, parents[made] = node.parent, depths[made] = node.depth, p[made] = node.probability;
      ++made;
      if (node.depth == deepest) continue;
      const size_t after = matches_.size();
      for (size_t i = 0; i < count_; ++i)
        matches_.push_back(automata_[i]->follow(matches_[node.matches + i], static_cast<int32_t>(node.token)));
      find_levels(after);
      push(after, made, node.depth + 1, node.path);
    }
    return made;
  }

 private:
  void find_levels(size_t matches) {
    levels_.clear();
    for (size_t i = 0; i < count_; ++i) {
      const Automaton& automaton = *automata_[i];
      auto [state, length] = matches_[matches + i];
      for (int number = 0; state != kRoot && length >= rule_.min_match && number < kMaxLevels;) {
        if (automaton.state(state).first != kNone) {
          const int64_t counted = length - (i > 0 ? rule_.handicap : 0);
          levels_.push_back({counted * 1024 - static_cast<int64_t>(i), length, state, &automaton});
          ++number;
        }
        state = automaton.state(state).link;
        length = automaton.state(state).length;
      }
    }
    std::sort(levels_.begin(), levels_.end(), [](const Level& a, const Level& b) { return a.rank > b.rank; });
  }

  // Adds the children of a node, whose contexts are in levels_.
  void push(size_t matches, int64_t parent, int64_t depth, double path) {
    find_shares();
    const size_t kept = std::min(shares_.size(), static_cast<size_t>(rule_.max_children));
    for (size_t i = 0; i < kept; ++i) {
      size_t best = i;  // the first of the best: others keep their order
      for (size_t j = i + 1; j < shares_.size(); ++j)
        if (shares_[j].mass > shares_[best].mass) best = j;
      std::rotate(shares_.begin() + i, shares_.begin() + best, shares_.begin() + best + 1);
      const double whole = path * shares_[i].mass;
      if (whole < rule_.min_probability) continue;
      pending_.push_back({whole, shares_[i].mass, number_++, shares_[i].token, parent, depth, matches});
      std::push_heap(pending_.begin(), pending_.end());
    }
  }

  void find_shares() {
    std::fill(places_.begin(), places_.end(), kNone);
    shares_.clear();
    double rest = 1.0;
    for (const Level& level : levels_) {
      const State& state = level.automaton->state(level.state);
      int64_t known = 0;
      int32_t e = state.first;
      for (int i = 0; i < kMaxEdges && e != kNone; ++i, e = level.automaton->edge(e).next)
        known += level.automaton->state(level.automaton->edge(e).target).count;
      const double doubt = rule_.doubts[level.length];
      const double total = static_cast<double>(known) + rule_.newest + doubt;
      e = state.first;
      for (int i = 0; i < kMaxEdges && e != kNone; ++i, e = level.automaton->edge(e).next) {
        const Edge& edge = level.automaton->edge(e);
        const double count = level.automaton->state(edge.target).count;
        const double number = edge.token == state.newest ? count + rule_.newest : count;
        if (number > 0.0) share_of(edge.token).mass += rest * (number / total);
      }
      rest *= doubt / total;
      if (rest < kLeastRest) break;
    }
  }

  Share& share_of(int32_t token) {
    const size_t slot = slot_of(token);
    if (places_[slot] == kNone) {
      places_[slot] = static_cast<int32_t>(shares_.size());
      shares_.push_back({token, 0.0});
    }
    return shares_[places_[slot]];
  }

  size_t slot_of(int32_t token) const {
    size_t slot = (static_cast<uint32_t>(token) * 2654435761u >> 8) & (places_.size() - 1);
    while (places_[slot] != kNone && shares_[places_[slot]].token != token) slot = (slot + 1) & (places_.size() - 1);
    return slot;
  }

  const Automaton* const* automata_;
  size_t count_;
  const Rule& rule_;
  std::vector<Match> matches_;  // of every expanded node, one for each automaton
  std::vector<Level> levels_;
  std::vector<Share> shares_;
  std::vector<int32_t> places_;  // of tokens in shares_
  std::vector<Pending> pending_;
  int64_t number_ = 0;
};

}  // namespace

extern "C" {

// No exception may leave a function that Python calls. Those that allocate return null or -1 where memory runs out.
void* suffix_new(int64_t max_match) {
  try {
    return new Automaton(static_cast<int32_t>(max_match));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void suffix_free(void* automaton) { delete static_cast<Automaton*>(automaton); }

int64_t suffix_extend(void* automaton, int64_t place, const int32_t* tokens, int64_t count) {
  try {
    return static_cast<Automaton*>(automaton)->extend(static_cast<int32_t>(place), tokens, count);
  } catch (const std::bad_alloc&) {  // the automaton can still be read and extended, but misses a token
    return -1;
  }
}

int64_t suffix_num_bytes(const void* automaton) { return static_cast<const Automaton*>(automaton)->num_bytes(); }

int64_t suffix_draft(const void* const* automata, int64_t count, const int32_t* text, int64_t size, const Rule* rule,
                     int64_t* tokens, int64_t* parents, int64_t* depths, double* probabilities) {
  try {
    Draft draft(reinterpret_cast<const Automaton* const*>(automata), count, *rule);
    return draft.grow(text, size, tokens, parents, depths, probabilities);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // extern "C"
