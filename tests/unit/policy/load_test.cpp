// SPDX-License-Identifier: GPL-2.0-or-later
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "plugin/policy/policy.h"

namespace agentgate::policy {
namespace {

namespace fs = std::filesystem;

class Load : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can make files that belong to root";
    char made[] = "/tmp/agentgate-policy-XXXXXX";
    ASSERT_NE(::mkdtemp(made), nullptr);
    root_ = made;
    directory_ = root_ / "policies";
    fs::create_directory(directory_);
    mode(directory_, 0755);
  }
  void TearDown() override {
    if (!root_.empty()) fs::remove_all(root_);
  }
  static void mode(const fs::path& path, mode_t bits) { ASSERT_EQ(::chmod(path.c_str(), bits), 0); }
  fs::path write(const std::string& name, const std::string& text, mode_t bits = 0644) {
    const fs::path path = directory_ / name;
    std::ofstream(path) << text;
    mode(path, bits);
    return path;
  }
  std::string refused(const std::string& name) {
    const auto loaded = load(directory_, name);
    return loaded ? "loaded" : loaded.error().to_string();
  }

  fs::path root_;
  fs::path directory_;
};

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST_F(Load, ReadsAFile) {
  write("web.json", "{\"version\":1}");
  const auto loaded = load(directory_, "web");
  ASSERT_TRUE(loaded) << loaded.error().to_string();
  EXPECT_EQ(loaded->name, "web");
  EXPECT_EQ(loaded->revision, "2430f1a2ad29");
  mode(directory_ / "web.json", 0600);
  EXPECT_TRUE(load(directory_, "web"));
}

TEST_F(Load, DefaultIsBuiltInUntilItIsWritten) {
  EXPECT_EQ(load(directory_, "default")->revision, "builtin");
  EXPECT_EQ(load(directory_ / "nowhere", "default")->revision, "builtin");
  EXPECT_TRUE(has(refused("web"), "there is no " + (directory_ / "web.json").string()));
  EXPECT_FALSE(load(directory_ / "nowhere", "web"));
  write("default.json", "{\"version\":1}");
  EXPECT_EQ(load(directory_, "default")->names.size(), 0U);
  write("default.json", "{");  // broken: not silently the built-in one
  EXPECT_TRUE(has(refused("default"), "default.json:1:2: the file ends"));
}

TEST_F(Load, RefusesWhatOthersCanWrite) {
  const fs::path file = write("web.json", "{\"version\":1}", 0664);
  EXPECT_TRUE(has(refused("web"), "run: chmod go-w " + file.string()));
  mode(file, 0646);
  EXPECT_TRUE(has(refused("web"), "run: chmod go-w " + file.string()));
  mode(file, 0644);
  ASSERT_EQ(::chown(file.c_str(), 1000, 0), 0);
  EXPECT_TRUE(has(refused("web"), "run: chown root " + file.string())) << refused("web");
  ASSERT_EQ(::chown(file.c_str(), 0, 1000), 0);
  EXPECT_EQ(refused("web"), "loaded");
  mode(directory_, 0775);
  EXPECT_TRUE(has(refused("web"), "run: chmod go-w " + directory_.string()));
  EXPECT_TRUE(has(refused("default"), "run: chmod go-w " + directory_.string()));
  mode(directory_, 0755);
  ASSERT_EQ(::chown(directory_.c_str(), 1000, 0), 0);
  EXPECT_TRUE(has(refused("web"), "run: chown root " + directory_.string()));
}

TEST_F(Load, RefusesWhatIsNotAPlainFile) {
  write("real.json", "{\"version\":1}");
  fs::create_symlink("real.json", directory_ / "web.json");
  EXPECT_TRUE(has(refused("web"), "is a symbolic link"));
  fs::create_symlink("real.json", directory_ / "default.json");
  EXPECT_TRUE(has(refused("default"), "is a symbolic link"));
  fs::create_directory(directory_ / "folder.json");
  EXPECT_TRUE(has(refused("folder"), "is not a regular file"));
  ASSERT_EQ(::mkfifo((directory_ / "pipe.json").c_str(), 0600), 0);
  EXPECT_TRUE(has(refused("pipe"), "is not a regular file"));  // and does not wait for a writer
  fs::create_directory_symlink(directory_, root_ / "link");
  EXPECT_TRUE(has(load(root_ / "link", "real").error().to_string(),
                  "is a symbolic link or not a directory"));
}

TEST_F(Load, RefusesNamesThatLeaveTheDirectory) {
  for (const char* name : {"", "../web", "a/b", ".", "Web", "-web", "web.json"}) {
    EXPECT_TRUE(has(refused(name), "is not a policy name")) << name;
  }
}

TEST_F(Load, RefusesHugeFilesAndReportsEveryError) {
  write("big.json", "{\"version\":1}" + std::string(4U << 20, ' '));
  EXPECT_TRUE(has(refused("big"), "larger than 4 MiB"));
  const fs::path file = write("bad.json", "{\n\"a\":1,\n\"b\":2}");
  const std::string text = refused("bad");
  EXPECT_TRUE(has(text, file.string() + ":2:1: unknown key 'a'")) << text;
  EXPECT_TRUE(has(text, file.string() + ":3:1: unknown key 'b'"));
  EXPECT_TRUE(has(text, file.string() + ":1:1: \"version\" is missing"));
}

TEST_F(Load, ListsPolicies) {
  EXPECT_EQ(list(directory_ / "nowhere").value(), std::vector<std::string>{});
  EXPECT_EQ(list(directory_).value(), std::vector<std::string>{});
  for (const char* name :
       {"web.json", "default.json", "a-1.json", "Bad.json", "notes.txt", ".json", "x.json~"}) {
    write(name, "{}");
  }
  EXPECT_EQ(list(directory_).value(), (std::vector<std::string>{"a-1", "default", "web"}));
}

TEST_F(Load, ExamplesOfThePackageAreGood) {
  const fs::path examples = fs::path(SOURCE_DIR) / "packaging/policies";
  unsigned seen = 0;
  for (const auto& entry : fs::directory_iterator(examples)) {
    if (entry.path().extension() != ".json") continue;
    std::ifstream in(entry.path());
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    const ParseResult result = parse(text, entry.path().stem(), entry.path());
    for (const auto& line : result.errors) ADD_FAILURE() << line;
    for (const auto& line : result.warnings) ADD_FAILURE() << line;
    ++seen;
  }
  EXPECT_GE(seen, 3U);
}

}  // namespace
}  // namespace agentgate::policy
