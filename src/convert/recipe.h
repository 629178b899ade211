// How a tensor to be written is made from tensors of the source. Renaming, llama.cpp's order of q
// and k rows, stacks of experts, fused and split projections and V-head orders all move whole rows
// (and, in one case, whole blocks of columns). So quantised rows move unchanged; only small vectors
// change value.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "bittern/tensor.h"

namespace bittern {

struct RowRun {
  std::uint32_t source = 0;  // of Recipe::sources
  std::int64_t first = 0, count = 0, step = 1;
};

enum class ValueMap { same, plus_one, minus_one, negative_exp, log_negative };

struct Recipe {
  std::string name{};
  Shape shape{};
  std::vector<std::string> sources{};
  // In order; empty: the numbers of the one source, in their order. A row is `width` numbers, in
  // the sources and here alike: mostly the last dimension (0 says so); 1 where elements of a
  // vector move.
  std::vector<RowRun> rows{};
  std::int64_t width = 0;
  // Block b of the columns is block columns[b] of the source; empty: columns do not move. Never
  // together with rows.
  std::int64_t column_block = 0;
  std::vector<std::int64_t> columns{};
  ValueMap map = ValueMap::same;  // anything but `same` is for plain numbers only
  std::vector<float> values{};    // the numbers themselves, of a tensor without sources
};

}  // namespace bittern
