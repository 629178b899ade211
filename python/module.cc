// The Python module `_bittern`. bittern/__init__.py adds the functions that infer a descriptor from
// arrays.
#include "binding.h"
#include "bittern/environment.h"
#include "bittern/version.h"

NB_MODULE(_bittern, m) {
  using namespace bittern;
  m.attr("__version__") = version();
  m.def("num_threads", [] { return num_threads(); }, "Threads a CPU kernel may use.");
  m.def(
      "set_num_threads",
      [](int threads) {
        check(check_num_threads(threads));
        set_num_threads(threads);
      },
      nb::arg("threads"));
  bind_tensor(m);
  bind_codec(m);
  bind_plan(m);
  bind_kv_cache(m);
  bind_convert(m);
  bind_tokenizer(m);
  bind_model(m);
  bind_decoding(m);
}
