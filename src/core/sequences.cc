#include "core/sequences.h"

#include <string>

#include "core/expect.h"
#include "core/guarded.h"

namespace bittern {

Status check_sequences(std::string_view op, const Sequences& s) noexcept try {
  BITTERN_TRY(expect_at_least(op, "batch", s.batch, 0));
  BITTERN_TRY(expect_at_least(op, "tokens", s.tokens, 0));
  BITTERN_TRY(expect_between(op, "sequences", s.sequences, 0, std::int64_t{1} << 31));
  if (s.sequences > 0 && s.batch != 1) {
    return fail(op, "batch", std::to_string(s.batch) + ", expected 1 with sequences");
  }
  if (s.sequences > 0) BITTERN_TRY(expect_between(op, "tokens", s.tokens, 0, INT32_MAX));
  return {};
} catch (...) {
  return caught(op);
}

Status check_cu_seqlens(std::string_view op, const Sequences& s,
                        const ConstView& cu_seqlens) noexcept try {
  if (s.sequences == 0) return {};
  const std::int32_t* at = cu_seqlens.as<std::int32_t>();
  const auto wrong = [&](std::int64_t i, const std::string& expected) {
    return fail(
        op, "cu_seqlens",
        "[" + std::to_string(i) + "] is " + std::to_string(at[i]) + ", expected " + expected);
  };
  if (at[0] != 0) return wrong(0, "0");
  for (std::int64_t i = 1; i <= s.sequences; ++i) {
    if (at[i] < at[i - 1]) {
      return wrong(i, "at least [" + std::to_string(i - 1) + "], " + std::to_string(at[i - 1]));
    }
  }
  if (at[s.sequences] != s.tokens) {
    return wrong(s.sequences, "tokens, " + std::to_string(s.tokens));
  }
  return {};
} catch (...) {
  return caught(op);
}

std::vector<Sequence> sequences_of(const Sequences& s, const ConstView& cu_seqlens) {
  std::vector<Sequence> all;
  std::int64_t chunks = 0;
  for (std::int64_t i = 0; i < s.count(); ++i) {
    Sequence one{i * s.tokens, (i + 1) * s.tokens, chunks};
    if (s.sequences > 0) {
      one.begin = cu_seqlens.as<std::int32_t>()[i];
      one.end = cu_seqlens.as<std::int32_t>()[i + 1];
    }
    chunks += s.chunks(one.end - one.begin);
    all.push_back(one);
  }
  return all;
}

}  // namespace bittern
