// All checks of this program happen while it is compiled and linked; see CMakeLists.txt.
int main() { return 0; }
