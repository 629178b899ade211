#include <string>

#include "bittern/distill.h"
#include "convert/matrix_coder.h"
#include "convert/option_names.h"
#include "core/guarded.h"
#include "core/ranks.h"
#include "distill/gptq_coder.h"

namespace bittern {
namespace {

constexpr std::int64_t kPieces = 128, kContext = 512;
constexpr std::int64_t kMostPieces = std::int64_t{1} << 24, kMostContext = std::int64_t{1} << 20;

Status check(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return {};
  return invalid(std::string("@{") + field + "}: " + std::to_string(value) +
                 ", expected an integer " + std::to_string(least) + ".." + std::to_string(most));
}

Result<QuantizeReport> quantize(const std::string& source, const std::string& out,
                                const QuantizeOptions& options) {
  if (!options.data || options.data->empty())
    return invalid("@{method} gptq: no text given, expected @{data}, the path of one");
  const std::int64_t pieces = options.pieces.value_or(kPieces),
                     context = options.context.value_or(kContext);
  BITTERN_TRY(check("pieces", pieces, 1, kMostPieces));
  BITTERN_TRY(check("context", context, 2, kMostContext));  // one may be bos alone: no text at all
  GptqCoder coder(source, *options.data, pieces, context, options.fisher, options.ranks);
  return quantize_model(source, out, options, &coder);
}

}  // namespace

Result<QuantizeReport> quantize_calibrated(const std::string& source, const std::string& out,
                                           const QuantizeOptions& options) noexcept {
  if (options.method != "gptq") return quantize_model(source, out, options);
  return agreed(options.ranks, guarded("quantize_calibrated", [&]() -> Result<QuantizeReport> {
                  auto report = quantize(source, out, options);
                  if (!report) return with_option_names(report.status(), options.option_name);
                  return report;
                }));
}

}  // namespace bittern
