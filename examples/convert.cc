// convert [MODEL OUT]: quantises a model to 4 bits with a bar of progress, and says what came of
// it. Without arguments it makes a small model of its own.
#include <bittern/convert.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace {

using namespace bittern;

// A safetensors file: the length of a JSON header, the header, and the numbers.
void write_model(const std::string& path) {
  const std::string header =
      R"({"a.weight":{"dtype":"F32","shape":[64,256],"data_offsets":[0,65536]}})";
  std::vector<float> weights(64 * 256);
  for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = std::sin(static_cast<float>(i));
  const std::uint64_t length = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
  file.write(reinterpret_cast<const char*>(weights.data()), 65536);
}

Status convert(const std::string& model, const std::string& out) {
  QuantizeOptions options{.bits = 4, .group_size = 64};
  options.progress = [](const ModelProgress& state) {
    std::printf("\r%s %3.0f %%", std::string(state.doing).c_str(),
                100.0 * static_cast<double>(state.done) / static_cast<double>(state.total));
    return true;  // false would cancel, and .resume = true continue later
  };
  const auto report = quantize_model(model, out, options);
  if (!report) return report.status();
  std::printf("\n%s: %.3f bits per weight\n", report->output.c_str(), report->bits_per_weight);
  for (const std::string& note : report->notes) std::printf("note: %s\n", note.c_str());

  const auto made = inspect_model(out);
  if (!made) return made.status();
  for (const StorageTotal& total : made->storages)
    std::printf("%llu tensors of %s\n", static_cast<unsigned long long>(total.tensors),
                total.storage.c_str());
  const auto comparison = compare_models(model, out);
  if (!comparison) return comparison.status();
  std::printf("relative error %.4f\n", comparison->relative_error());
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  guard_mapped_files();  // a file that shrinks is an error, not a signal
  const fs::path scratch = fs::temp_directory_path() / "bittern_convert_example";
  std::string model = (scratch / "model.safetensors").string(), out = (scratch / "4bit").string();
  if (argc == 3) {
    model = argv[1];
    out = argv[2];
  } else {
    fs::remove_all(scratch);
    fs::create_directories(scratch);
    write_model(model);
  }
  const Status status = convert(model, out);
  if (!status.ok()) std::printf("\n%s\n", std::string(status.message()).c_str());
  if (argc != 3) fs::remove_all(scratch);
  return status.ok() ? 0 : 1;
}
