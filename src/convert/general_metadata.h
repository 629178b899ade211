// Descriptive metadata of a model: name, authors, licence, languages, base models. GGUF has them
// under general.*. A folder has them in gguf_metadata.json, an object with the same keys from which
// a GGUF file gets them back, and in the model card, README.md, for people and for the Hub
// (docs/formats.md).
#pragma once
#include <string>
#include <vector>

#include "bittern/status.h"
#include "convert/architecture.h"
#include "convert/tokenizer.h"
#include "formats/gguf_contents.h"

namespace bittern {

// gguf_metadata.json and README.md of a folder made of the file; none where the file says nothing.
// What JSON cannot say is noted.
std::vector<TextFile> general_from_gguf(const GgufFile& file, std::vector<std::string>& notes);

// general.* keys for a GGUF file made of the folder: from gguf_metadata.json, or else from what
// README.md says before its text. What is not understood of the card is noted.
Result<GgufMetadata> general_to_gguf(const std::string& folder, std::vector<std::string>& notes);

}  // namespace bittern
