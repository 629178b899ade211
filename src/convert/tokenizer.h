// Tokenisers between worlds: tokenizer.json and its companions, and GGUF's tokenizer.* metadata.
// Byte-level BPE ("gpt2" in GGUF, with the pre-tokeniser named by tokenizer.ggml.pre) and
// sentencepiece's BPE with byte fallback ("llama"). Anything else is an error that says so.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "bittern/status.h"
#include "formats/gguf_contents.h"

namespace bittern {

struct TextFile {
  std::string name;  // "tokenizer.json"
  std::string text;
};

// tokenizer.json, tokenizer_config.json (with the chat template), special_tokens_map.json where
// needed, generation_config.json with the special ids.
Result<std::vector<TextFile>> tokenizer_from_gguf(const GgufFile& file);

// tokenizer.ggml.* and tokenizer.chat_template from the files of a folder. `vocab_size` is the
// model's: missing ids are filled as llama.cpp's converter does ("[PAD123]", unused). `like_phi3`:
// set if tokens include the spaces after them, for which the model needs a Phi-3 name (named_for);
// if null, such tokens are refused.
Result<std::vector<std::pair<std::string, GgufData>>> tokenizer_to_gguf(const std::string& folder,
                                                                        std::int64_t vocab_size,
                                                                        bool* like_phi3 = nullptr);

}  // namespace bittern
