#include "distill/training_text.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "bittern/tokenizer.h"
#include "core/split_mix.h"
#include "formats/fingerprint.h"

namespace bittern {
namespace {

std::uint64_t hash_of(const std::int32_t* piece, std::int64_t context) {
  Fingerprint hash;
  hash.add(std::as_bytes(std::span(piece, static_cast<std::size_t>(context))));
  return hash.value();
}

}  // namespace

std::uint64_t TrainingText::fingerprint() const {
  Fingerprint hash;
  for (const CalibrationText* text : {&train, &validation}) {
    hash.add(static_cast<std::uint64_t>(text->context));
    hash.add(std::as_bytes(std::span(text->tokens)));
  }
  return hash.value();
}

std::vector<std::int64_t> TrainingText::order(std::int64_t n, std::uint64_t seed) const {
  std::vector<std::int64_t> order(static_cast<std::size_t>(train.pieces()));
  std::iota(order.begin(), order.end(), 0);
  std::uint64_t z = split_mix(seed + kGolden * static_cast<std::uint64_t>(n + 1));
  for (std::size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[split_mix(z += kGolden) % i]);
  return order;
}

Result<CalibrationText> read_texts(const std::string& model, const std::vector<std::string>& paths,
                                   std::int64_t context) {
  const auto tokenizer = Tokenizer::load(model);
  if (!tokenizer) return tokenizer.status();
  CalibrationText all{.context = context, .tokens = {}};
  for (const std::string& path : paths) {
    const auto text = read_pieces(*tokenizer, path, context);
    if (!text) return text.status();
    for (std::int64_t i = 0; i < text->pieces(); ++i) all.add(text->piece(i));
  }
  return all;
}

Result<TrainingText> hold_out(const CalibrationText& all, std::int64_t validation) {
  const std::int64_t context = all.context;
  if (all.pieces() <= validation)
    return invalid("@{data}: " + std::to_string(all.pieces()) + " pieces of " +
                   std::to_string(context) + " tokens, expected more than the " +
                   std::to_string(validation) +
                   " that @{validation} holds out (@{context} makes pieces shorter)");

  TrainingText text{.train = {.context = context, .tokens = {}},
                    .validation = some_of(all, validation)};
  std::set<std::uint64_t> held_out;
  for (std::int64_t i = 0; i < text.validation.pieces(); ++i)
    held_out.insert(hash_of(text.validation.piece(i), context));
  for (std::int64_t i = 0; i < all.pieces(); ++i)
    if (!held_out.contains(hash_of(all.piece(i), context))) text.train.add(all.piece(i));
  if (text.train.pieces() == 0)
    return invalid("@{data}: all pieces of the text equal the held-out ones; give more text");
  return text;
}

}  // namespace bittern
