// Texts that a model is run on.
#pragma once
#include <cstdint>
#include <string>

#include "bittern/status.h"
#include "bittern/tokenizer.h"

namespace bittern {

// A file's text, which is not empty, and UTF-8 unless `any_bytes`; the error then names the remedy,
// where there is one.
Result<std::string> read_text(const std::string& path, bool any_bytes, const std::string& remedy);
// What llama.cpp puts in place of each piece's first token: bos, if the tokeniser puts one before
// texts; else -1.
Result<std::int32_t> first_of_pieces(const Tokenizer& tokenizer);

}  // namespace bittern
