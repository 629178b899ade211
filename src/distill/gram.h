// H = the sum of x x^T over the inputs x of a product: what an error of its weights costs.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "bittern/ranks.h"
#include "bittern/status.h"
#include "bittern/tensor.h"
#include "distill/linear_algebra.h"

namespace bittern {

class Gram {
 public:
  // Of several processes each adds up a part of H, from the same rows, until complete().
  explicit Gram(std::int64_t inputs, const Ranks* ranks = nullptr);

  // Adds weight x x^T for each row of x, f32 [rows, inputs]; without weights, x x^T. Products are
  // summed in f32 over up to 256 rows, by fma with rows ascending, and those sums in f64.
  void add(const ConstView& x, std::span<const float> weights = {});

  // All of H in every process.
  Status complete(Ranks& ranks);

  std::int64_t inputs() const { return sums_.size(); }
  std::uint64_t rows() const { return rows_; }
  // The sums so far; the upper triangle counts.
  const SquareMatrix& sums() const { return sums_; }

 private:
  struct Pair {  // of panels: a square of H
    std::int64_t i, j;
  };
  // [first, end) of pairs_ that process `rank` of `count` adds up.
  struct Part {
    std::size_t first, end;
  };
  Part part_of(int rank, int count) const;

  SquareMatrix sums_;
  std::vector<Pair> pairs_;
  Part own_;
  std::uint64_t rows_ = 0;
  std::vector<float> left_, right_;  // panels of the rows at hand
};

}  // namespace bittern
