// Flags of the verbs that run a model.
#pragma once
#include <string>

#include "bittern/model.h"
#include "bittern/tokenizer.h"
#include "cli/cli.h"
#include "eval/text_file.h"

namespace bittern::cli {

struct ModelFlags {
  std::string path;
  std::string activations = "int16";
  bool fastest = false;
  std::int64_t context = 0;
  SessionOptions session;
  std::string skip_layers;
};

void add_model_flags(CLI::App& verb, ModelFlags& flags);  // one model, its context and kernels, and
void add_run_flags(CLI::App& verb, ModelFlags& flags);    // how it runs
LoadOptions load_options(const ModelFlags& flags);
CLI::Validator activations_check();  // of --activations
Result<Model> load_model(const ModelFlags& flags);
// What --kv and the flags beside it ask for.
Result<SessionOptions> session_options(const ModelFlags& flags);
// Session::check, before the model is loaded, and Session::make: errors name the flags.
Status check_session(const ModelInfo& info, const SessionOptions& options);
Result<Session> make_session(const Model& model, const SessionOptions& options);
// Whether the model has logits for every token that the tokeniser knows.
Status check_vocabulary(const Model& model, const Tokenizer& tokenizer, const std::string& path);

// What to do about a text that is not UTF-8.
inline constexpr const char* kAnyBytes = "--any-bytes takes it as it is";

}  // namespace bittern::cli
