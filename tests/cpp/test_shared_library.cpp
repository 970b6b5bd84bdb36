// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The xpuruntime developers
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "fake_kernels.h"
#include "xpuruntime/shared_library.h"

namespace xpuruntime {
namespace {

using testing::contains;
using testing::refusal_of;

class SharedLibraryTest : public ::testing::Test {
 protected:
  SharedLibraryTest() : before_(SharedLibrary::search_folders()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "xpuruntime.XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~SharedLibraryTest() override {
    SharedLibrary::set_search_folders(before_);
    std::filesystem::remove_all(folder_);
  }

  std::vector<std::string> before_;
  std::filesystem::path folder_;
};

TEST_F(SharedLibraryTest, TakesWhatIsLoadedAlready) {
  const SharedLibrary library =
      SharedLibrary::open({"libnothing-of-this-name.so.1", "libc.so.6"}, "install it");
  EXPECT_TRUE(contains(library.path(), "libc")) << library.path();
  EXPECT_EQ(library.get<int (*)(int)>("abs")(-3), 3);
  EXPECT_EQ(library.try_find("no_such_function_here"), nullptr);
  const std::string text = refusal_of([&] { (void)library.find("no_such_function_here"); });
  EXPECT_TRUE(contains(text, "no_such_function_here")) << text;
  EXPECT_TRUE(contains(text, library.path())) << text;
}

TEST_F(SharedLibraryTest, SaysWhereItLookedAndWhatToDo) {
  std::ofstream(folder_ / "libxpuruntime-test.so.7") << "this is no library";
  SharedLibrary::set_search_folders({folder_.string(), "/no/such/folder"});
  const std::string text = refusal_of([] {
    (void)SharedLibrary::open({"libxpuruntime-test.so.8", "libxpuruntime-test.so.7"},
                              "pip install xpuruntime[test]");
  });
  for (const std::string& part :
       {std::string("libxpuruntime-test.so.8 or libxpuruntime-test.so.7"), folder_.string(),
        std::string("/no/such/folder"), std::string("the system's own folders"),
        std::string("pip install xpuruntime[test]"), std::string("file too short")}) {
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  }
}

TEST_F(SharedLibraryTest, NoneFindsNothing) {
  const SharedLibrary none;
  EXPECT_EQ(none.try_find("abs"), nullptr);
  EXPECT_THROW((void)none.find("abs"), UnsupportedOperationError);
}

}  // namespace
}  // namespace xpuruntime
