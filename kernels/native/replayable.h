// Calls of exported functions by a list of words, for captured steps (kernels/replay).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace specmamba {

// A word as one argument: a pointer, an integer, or the bits of a floating-point number.
template <typename T>
T argument(uint64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(static_cast<uintptr_t>(word));
  } else if constexpr (std::is_floating_point_v<T>) {
    T number;
    std::memcpy(&number, &word, sizeof number);
    return number;
  } else {
    return static_cast<T>(word);
  }
}

template <typename Result, typename... Arguments, std::size_t... I>
int call(Result (*function)(Arguments...), const uint64_t* words, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>) {
    function(argument<Arguments>(words[I])...);
    return 1;
  } else {
    return static_cast<int>(function(argument<Arguments>(words[I])...));
  }
}

template <typename Result, typename... Arguments>
int call(Result (*function)(Arguments...), const uint64_t* words) {
  return call(function, words, std::index_sequence_for<Arguments...>{});
}

}  // namespace specmamba

// Exports `int name_replay(const uint64_t* words)`: calls name. 0: it failed; functions without a result do not fail.
#define SPECMAMBA_REPLAYABLE(name) \
  extern "C" int name##_replay(const uint64_t* words) { return specmamba::call(name, words); }
