// SPDX-License-Identifier: GPL-2.0-or-later
//
// usage: fuzz_NAME PATH... [-runs=N]
// Stands in for libFuzzer where the compiler has none: every file (of a folder, all of them), then
// N mutations of the files, the same ones each time. Finds what is near the seeds; scripts/fuzz
// looks further. The input at hand is in fuzz_NAME.input in the working directory, and stays there
// when a run does not return.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Input = std::vector<std::uint8_t>;
constexpr std::size_t kLongest = 4096;

Input read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return Input(std::istreambuf_iterator<char>(in), {});
}

class Mutator {
 public:
  explicit Mutator(const std::vector<Input>& seeds) : seeds_(seeds) {}

  Input next() {
    Input out = seeds_[below(seeds_.size())];
    for (std::size_t left = 1 + below(4); left > 0; --left) change(out);
    if (out.size() > kLongest) out.resize(kLongest);
    return out;
  }

 private:
  // Not std::uniform_int_distribution: what that gives differs between libraries.
  std::size_t below(std::size_t end) { return end == 0 ? 0 : random_() % end; }

  void change(Input& out) {
    static constexpr std::uint8_t kTelling[] = {0,   1,   0x7f, 0x80, 0xff, ' ', '"', '\\', '{',
                                                '}', '[', ']',  ',',  ':',  '.', '/', '-',  '9'};
    const std::size_t at = below(out.size());
    const std::size_t size = 1 + below(std::min<std::size_t>(out.size() - at, 32));
    const auto from = out.begin() + static_cast<std::ptrdiff_t>(at);
    const auto to = from + static_cast<std::ptrdiff_t>(std::min(size, out.size() - at));
    switch (out.empty() ? 3 : below(9)) {
      case 0:
        *from ^= static_cast<std::uint8_t>(1U << below(8));
        return;
      case 1:
        *from = static_cast<std::uint8_t>(below(256));
        return;
      case 2:
        *from = kTelling[below(std::size(kTelling))];
        return;
      case 3:
        out.insert(from, kTelling[below(std::size(kTelling))]);
        return;
      case 4:
        out.erase(from, to);
        return;
      case 5:
        out.resize(at);
        return;
      case 6: {  // a part once more
        const Input part(from, to);
        out.insert(from, part.begin(), part.end());
        return;
      }
      case 7: {  // a part of another seed in its place
        const Input& other = seeds_[below(seeds_.size())];
        const std::size_t begin = below(other.size());
        const std::size_t length = std::min(size, other.size() - begin);
        const auto part = other.begin() + static_cast<std::ptrdiff_t>(begin);
        out.insert(out.erase(from, to), part, part + static_cast<std::ptrdiff_t>(length));
        return;
      }
      default: {  // another number, or length, of 16 bits
        const auto value = static_cast<std::uint16_t>(below(2) == 0 ? below(64) : below(65536));
        std::memcpy(&*from, &value, std::min<std::size_t>(sizeof value, out.size() - at));
      }
    }
  }

  const std::vector<Input>& seeds_;
  std::mt19937_64 random_{20240229};
};

class Runner {
 public:
  explicit Runner(std::string path) : path_(std::move(path)) {
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  }
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  ~Runner() {
    ::close(file_);
    ::unlink(path_.c_str());
  }
  [[nodiscard]] bool usable() const { return file_ >= 0; }
  // In a block of its own size, so that reading past its end is seen.
  [[nodiscard]] bool run(const Input& input) const {
    if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, input.data(), input.size(), 0) < 0) {
      return false;
    }
    const Input exact(input.begin(), input.end());
    (void)LLVMFuzzerTestOneInput(exact.data(), exact.size());
    return true;
  }

 private:
  std::string path_;
  int file_;
};

}  // namespace

int main(int argc, char** argv) {
  namespace fs = std::filesystem;
  std::vector<fs::path> paths;
  std::size_t runs = 0;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word.rfind("-runs=", 0) == 0) {
      runs = std::stoul(word.substr(6));
    } else if (fs::is_directory(word)) {
      for (const auto& entry : fs::directory_iterator(word)) paths.push_back(entry.path());
    } else {
      paths.emplace_back(word);
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<Input> seeds;
  for (const auto& path : paths) seeds.push_back(read_file(path));
  if (seeds.empty()) {
    std::fprintf(stderr, "usage: %s PATH... [-runs=N]\n", argv[0]);
    return 64;
  }

  const std::string current =
      (fs::current_path() / (fs::path(argv[0]).filename().string() + ".input")).string();
  std::fprintf(stderr, "when this does not end well, the input is in %s\n", current.c_str());
  const Runner runner(current);
  bool written = runner.usable() && runner.run({});
  for (const Input& seed : seeds) written = written && runner.run(seed);
  Mutator mutator(seeds);
  for (std::size_t i = 0; i < runs && written; ++i) written = runner.run(mutator.next());
  if (!written) {
    std::fprintf(stderr, "%s cannot be written\n", current.c_str());
    return 1;
  }
  std::fprintf(stderr, "%zu seeds and %zu mutations\n", seeds.size(), runs);
  return 0;
}
