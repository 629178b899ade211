// Races on purpose, inside an OpenMP region: the tsan preset must report it, or its silence about
// the thread tests would mean nothing.
#include <cstdio>

int main() {
  int sum = 0;
  for (int round = 0; round < 100; ++round) {
#pragma omp parallel for num_threads(4) schedule(static, 1)
    for (int t = 0; t < 4; ++t) sum += t;
  }
  std::printf("%d\n", sum);
}
