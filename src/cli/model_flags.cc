#include "cli/model_flags.h"

#include <fmt/format.h>

#include <charconv>
#include <string_view>
#include <utility>

#include "bittern/generate.h"
#include "plan/names.h"

namespace bittern::cli {
namespace {

// "first2,last2": attention layers whose cache is not compressed.
Status parse_skipped(const std::string& text, SessionOptions& options) {
  if (text.empty()) return {};
  const auto refuse = [&](const char* expected) {
    return invalid(fmt::format("--kv-skip-layers: {}, expected {}", text, expected));
  };
  bool given[2] = {};
  for (std::string_view rest = text;;) {
    const std::string_view word = rest.substr(0, rest.find(','));
    const bool first = word.starts_with("first"), last = word.starts_with("last");
    const std::string_view digits = word.substr(first ? 5 : last ? 4 : word.size());
    std::int64_t count = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), count);
    if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() || count < 0)
      return refuse("words such as first2,last2");
    if (std::exchange(given[first ? 0 : 1], true)) return refuse("first and last once each");
    (first ? options.skip_first : options.skip_last) = count;
    if (word.size() == rest.size()) return {};
    rest.remove_prefix(word.size() + 1);
  }
}

// The flag of a field of SessionOptions that a message begins with.
Status with_flags(const Status& status) {
  constexpr std::pair<std::string_view, const char*> kFlags[] = {
      {"kv: ", "--kv: "},
      {"skip_first: ", "--kv-skip-layers: first"},
      {"skip_last: ", "--kv-skip-layers: last"}};
  for (const auto& [field, flag] : kFlags)
    if (status.message().starts_with(field))
      return {status.code(), flag + std::string(status.message().substr(field.size()))};
  return status;
}

}  // namespace

CLI::Validator activations_check() {
  return CLI::Validator(
      [](const std::string& text) {
        return parse_activations(text) ? std::string() : text + ", expected float, int16 or int8";
      },
      "");
}

void add_model_flags(CLI::App& verb, ModelFlags& flags) {
  verb.add_option("MODEL,-m,--model", flags.path, "a .gguf file, or a Hugging Face or MLX folder")
      ->required();
  verb.add_option("-c,--ctx,--ctx-size", flags.context,
                  "the most tokens of a text (default: what the model was made for)")
      ->option_text("N")
      ->check(integer_in(1, std::int64_t{1} << 24));
  verb.add_flag(
      "--fastest", flags.fastest,
      "also use kernels that are faster but less exact, each with a stated bound: bf16 "
      "products of plain weights, and of all with --activations float, 8-bit ones for caches "
      "with 4-bit keys");
  add_run_flags(verb, flags);
}

void add_run_flags(CLI::App& verb, ModelFlags& flags) {
  verb.add_option("--activations", flags.activations,
                  "how activations meet quantised weights: float, int16 or int8 (default: int16)")
      ->option_text("KIND")
      ->check(activations_check());
  verb.add_option("--kv", flags.session.kv,
                  "the cache of keys and values: f32, f16, bf16, or compressed: aura and the bits "
                  "of K and V, 1 to 8, such as aura8v4 (aura8 is aura8v8) (default: f16)")
      ->option_text("KIND");
  verb.add_option("--kv-first", flags.session.first,
                  "keep the first N tokens of a compressed cache in bf16 (default: 0)")
      ->option_text("N")
      ->check(integer_in(0, 1 << 20));
  verb.add_option("--kv-recent", flags.session.recent,
                  "keep the newest N tokens of a compressed cache in bf16 (default: 0)")
      ->option_text("N")
      ->check(integer_in(0, 1 << 20));
  verb.add_option("--kv-skip-layers", flags.skip_layers,
                  "do not compress the cache of these attention layers, such as first2,last2")
      ->option_text("LAYERS");
}

LoadOptions load_options(const ModelFlags& flags) {
  LoadOptions options{.context = flags.context};
  if (const auto kind = parse_activations(flags.activations)) options.activations = *kind;
  if (flags.fastest) options.preference = Preference::fastest;
  return options;
}

Result<Model> load_model(const ModelFlags& flags) {
  return Model::load(flags.path, load_options(flags));
}

Result<SessionOptions> session_options(const ModelFlags& flags) {
  SessionOptions options = flags.session;
  BITTERN_TRY(parse_skipped(flags.skip_layers, options));
  const bool compressed = options.kv.starts_with("aura");
  if (!compressed && (options.first != 0 || options.recent != 0 || !flags.skip_layers.empty()))
    return invalid(fmt::format(
        "--kv-first, --kv-recent and --kv-skip-layers are for a compressed cache, and --kv is {}",
        options.kv));
  return options;
}

Status check_session(const ModelInfo& info, const SessionOptions& options) {
  return with_flags(Session::check(info, options));
}

Result<Session> make_session(const Model& model, const SessionOptions& options) {
  auto session = Session::make(model, options);
  if (!session) return with_flags(session.status());
  return session;
}

Status check_vocabulary(const Model& model, const Tokenizer& tokenizer, const std::string& path) {
  const Status status = bittern::check_vocabulary(model.info(), tokenizer);
  return status.ok() ? status
                     : Status(status.code(), fmt::format("{}: {}", path, status.message()));
}

}  // namespace bittern::cli
