// run_model MODEL TEXT: continues a text with a model, a GGUF file or a folder, with a compressed
// cache.
#include <bittern/generate.h>

#include <cstdio>
#include <string>

namespace {

using namespace bittern;

Status run(const std::string& path, const std::string& text) {
  const auto tokenizer = Tokenizer::load(path);
  if (!tokenizer) return tokenizer.status();
  const auto model = Model::load(path);
  if (!model) return model.status();
  auto session = Session::make(*model, {.kv = "aura8v4"});
  if (!session) return session.status();
  const auto prompt = tokenizer->encode(text);
  if (!prompt) return prompt.status();

  auto generator = Generator::start(*session, &*tokenizer, *prompt, {.max_tokens = 100});
  if (!generator) return generator.status();
  while (true) {
    const auto piece = generator->next();
    if (!piece) return piece.status();
    if (!*piece) break;
    std::printf("%s", (*piece)->text.c_str());
    std::fflush(stdout);
  }
  std::printf("\n%lld tokens, %llu bytes of cache\n", static_cast<long long>(session->size()),
              static_cast<unsigned long long>(session->bytes().cache));
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: run_model MODEL TEXT\n");
    return 0;
  }
  const Status status = run(argv[1], argv[2]);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
