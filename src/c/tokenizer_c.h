// What stands behind a tokeniser of the C interface.
#pragma once
#include <string>

#include "bittern/c/tokenizer.h"
#include "bittern/tokenizer.h"

struct bittern_tokenizer {
  bittern::Tokenizer tokenizer;
  std::string chat_template;  // with a zero behind it
};
